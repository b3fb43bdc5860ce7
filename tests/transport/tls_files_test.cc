// Every kind of wrong file: an error that names it and says what would be right.
#include "atoll/transport/tls_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "atoll/tests/transport/certificates.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::transport::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TlsFilesTest : public ::testing::Test {
 protected:
  TlsFilesTest()
      : authority_(NewAuthority()),
        own_(Issue({}, &authority_)),
        options_(CertOptions(folder_, "own", own_, authority_)) {}

  /// The error of an endpoint with these files; "" if there is none.
  static std::string Error(const base::TlsOptions& options) {
    EndpointOptions endpoint = Options("member");
    endpoint.tls = options;
    auto made = CreateEndpoint(endpoint);
    if (made.ok()) return "";
    EXPECT_TRUE(absl::IsInvalidArgument(made.status())) << made.status();
    return std::string(made.status().message());
  }
  std::string ErrorWith(std::string base::TlsOptions::*file, const std::string& path) {
    base::TlsOptions options = options_;
    options.*file = path;
    return Error(options);
  }
  std::string ErrorOf(const Wish& wish) {
    return Error(CertOptions(folder_, "wished", Issue(wish, &authority_), authority_));
  }

  Folder folder_;
  const Issued authority_, own_;
  const base::TlsOptions options_;
};

TEST_F(TlsFilesTest, RightFilesAreTaken) {
  EXPECT_EQ(Error(options_), "");
  // With a CA between, and one more that is believed.
  const Issued between = Issue({.name = "between", .is_authority = true}, &authority_);
  base::TlsOptions options =
      CertOptions(folder_, "chain", Issue({}, &between), authority_, between.certificate_pem());
  options.ca_file =
      folder_.Write("two.ca", NewAuthority("another").certificate_pem() + authority_.certificate_pem());
  EXPECT_EQ(Error(options), "");
  EXPECT_EQ(ErrorOf({.extended_usage = "serverAuth,clientAuth"}), "");
}

TEST_F(TlsFilesTest, MissingOrSuperfluousOnes) {
  EXPECT_THAT(ErrorWith(&base::TlsOptions::certificate_file, ""), HasSubstr("--tls_cert (ATOLL_TLS_CERT)"));
  EXPECT_THAT(ErrorWith(&base::TlsOptions::key_file, ""), HasSubstr("--tls_key (ATOLL_TLS_KEY)"));
  EXPECT_THAT(ErrorWith(&base::TlsOptions::ca_file, ""), HasSubstr("--tls_ca (ATOLL_TLS_CA)"));
  for (base::TlsMode mode : {base::TlsMode::kNone, base::TlsMode::kPsk}) {
    base::TlsOptions options = options_;
    options.mode = mode;
    EXPECT_THAT(Error(options), HasSubstr("files are for --tls=cert alone"));
  }
}

TEST_F(TlsFilesTest, UnreadableOnes) {
  for (auto file :
       {&base::TlsOptions::certificate_file, &base::TlsOptions::key_file, &base::TlsOptions::ca_file}) {
    EXPECT_THAT(ErrorWith(file, "/nowhere/file.pem"),
                AllOf(HasSubstr("/nowhere/file.pem"), HasSubstr("No such file")));
    EXPECT_THAT(ErrorWith(file, folder_.path()),
                AllOf(HasSubstr(folder_.path()), HasSubstr("not a regular file")));
    const std::string fifo = folder_.path() + "/fifo";
    mkfifo(fifo.c_str(), 0600);
    EXPECT_THAT(ErrorWith(file, fifo), HasSubstr("not a regular file"));
    EXPECT_THAT(ErrorWith(file, folder_.Write("empty", "")), HasSubstr("in PEM"));
    EXPECT_THAT(ErrorWith(file, folder_.Write("large", std::string(2 << 20, 'x'))),
                HasSubstr("more than 1 MiB"));
    for (const std::string& junk : {std::string("junk\n"), Pattern(5000, 1)})
      EXPECT_THAT(ErrorWith(file, folder_.Write("junk", junk)),
                  AllOf(HasSubstr("/junk"), HasSubstr("in PEM")));
  }
}

TEST_F(TlsFilesTest, MalformedOnes) {
  std::string cut = own_.certificate_pem();
  cut.erase(cut.size() / 2, 20);
  EXPECT_THAT(ErrorWith(&base::TlsOptions::certificate_file, folder_.Write("cut.pem", cut)),
              AllOf(HasSubstr("cut.pem"), HasSubstr("certificate 1 in it is malformed")));
  EXPECT_THAT(
      ErrorWith(&base::TlsOptions::ca_file, folder_.Write("cut.ca", authority_.certificate_pem() + cut)),
      AllOf(HasSubstr("cut.ca"), HasSubstr("certificate 2 in it is malformed")));
  std::string key = own_.key_pem();
  key.erase(key.size() / 2, 20);
  EXPECT_THAT(ErrorWith(&base::TlsOptions::key_file, folder_.Write("cut.key", key)),
              AllOf(HasSubstr("cut.key"), HasSubstr("no private key in it that can be read")));
  // A key in the certificate's place, and the other way round.
  EXPECT_THAT(ErrorWith(&base::TlsOptions::certificate_file, options_.key_file),
              HasSubstr("no certificate in it"));
  EXPECT_THAT(ErrorWith(&base::TlsOptions::key_file, options_.certificate_file),
              HasSubstr("no private key in it"));
}

TEST_F(TlsFilesTest, KeysThatWillNotDo) {
  EXPECT_THAT(ErrorWith(&base::TlsOptions::key_file, folder_.Write("other.key", authority_.key_pem())),
              AllOf(HasSubstr("other.key"), HasSubstr(options_.certificate_file),
                    HasSubstr("should belong together")));
  EXPECT_THAT(ErrorWith(&base::TlsOptions::key_file, folder_.Write("open.key", own_.key_pem(), 0640)),
              AllOf(HasSubstr("open.key"), HasSubstr("chmod go=")));
  EXPECT_THAT(ErrorWith(&base::TlsOptions::key_file, folder_.Write("locked.key", own_.key_pem("secret"))),
              AllOf(HasSubstr("locked.key"), HasSubstr("it should have none")));
}

TEST_F(TlsFilesTest, CertificatesThatWillNotDo) {
  EXPECT_THAT(ErrorOf({.from_days = -3, .to_days = -1}),
              AllOf(HasSubstr("wished.pem"), HasSubstr("has expired"), HasSubstr("valid now")));
  EXPECT_THAT(ErrorOf({.from_days = 1, .to_days = 3}),
              AllOf(HasSubstr("wished.pem"), HasSubstr("not yet valid"), HasSubstr("valid now")));
  EXPECT_THAT(ErrorOf({.extended_usage = "serverAuth"}),
              AllOf(HasSubstr("wished.pem"), HasSubstr("TLS clients")));
  EXPECT_THAT(ErrorOf({.extended_usage = "clientAuth"}),
              AllOf(HasSubstr("wished.pem"), HasSubstr("TLS servers")));
  const Issued other = NewAuthority("another CA");
  const std::string path = folder_.Write("other.ca", other.certificate_pem());
  EXPECT_THAT(ErrorWith(&base::TlsOptions::ca_file, path),
              AllOf(HasSubstr("own.pem"), HasSubstr(path), HasSubstr("should be signed by it")));
  // The CA that ours comes from is not enough without the one between.
  const Issued between = Issue({.name = "between", .is_authority = true}, &authority_);
  EXPECT_THAT(Error(CertOptions(folder_, "gap", Issue({}, &between), authority_)),
              AllOf(HasSubstr("gap.pem"), HasSubstr("those in between")));
  const Issued old = Issue({.name = "old CA", .is_authority = true, .from_days = -3, .to_days = -1}, nullptr);
  EXPECT_THAT(Error(CertOptions(folder_, "late", Issue({}, &old), old)),
              AllOf(HasSubstr("late.ca"), HasSubstr("has expired")));
}

}  // namespace
}  // namespace Atoll::transport::testing
