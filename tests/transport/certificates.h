// A CA and certificates for tests, made anew each time: no file of them stands in the tree.
#pragma once

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "atoll/base/tls_options.h"

namespace Atoll::transport::testing {

/// A folder that goes with it, not with its copy in a child of fork.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "atoll-tls-XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~Folder() {
    if (getpid() == owner_) std::filesystem::remove_all(path_);
  }
  std::string Write(const std::string& name, const std::string& text, mode_t mode = 0600) {
    const std::string path = absl::StrCat(path_, "/", name);
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    return path;
  }
  const std::string& path() const { return path_; }

 private:
  const pid_t owner_ = getpid();
  std::string path_;
};

template <class T, void (*Free)(T*)>
struct Freer {
  void operator()(T* object) const { Free(object); }
};
using Key = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY, EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, Freer<X509, X509_free>>;

template <class Write>
std::string Pem(Write&& write) {
  BIO* const bio = BIO_new(BIO_s_mem());
  EXPECT_EQ(write(bio), 1);
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, size);
  BIO_free(bio);
  return text;
}

/// A certificate and its key.
struct Issued {
  Key key;
  Certificate certificate;

  std::string certificate_pem() const {
    return Pem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate.get()); });
  }
  std::string key_pem(const char* passphrase = nullptr) const {
    return Pem([&](BIO* bio) {
      return PEM_write_bio_PrivateKey(bio, key.get(), passphrase != nullptr ? EVP_aes_128_cbc() : nullptr,
                                      nullptr, 0, nullptr, const_cast<char*>(passphrase));
    });
  }
};

struct Wish {
  std::string name = "a member";
  bool is_authority = false;
  int from_days = -1, to_days = 1;
  const char* extended_usage = nullptr;  ///< "serverAuth"
};

/// Signed by `issuer`; by itself if that is null.
inline Issued Issue(const Wish& wish, const Issued* issuer) {
  Issued made;
  made.key.reset(EVP_EC_gen("P-256"));
  made.certificate.reset(X509_new());
  X509* const one = made.certificate.get();
  X509_set_version(one, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(one), std::hash<std::string>()(wish.name) % 1000000 + 1);
  X509_gmtime_adj(X509_getm_notBefore(one), wish.from_days * 86400L);
  X509_gmtime_adj(X509_getm_notAfter(one), wish.to_days * 86400L);
  X509_set_pubkey(one, made.key.get());
  X509_NAME_add_entry_by_txt(X509_get_subject_name(one), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(wish.name.c_str()), -1, -1, 0);
  const Issued& by = issuer != nullptr ? *issuer : made;
  X509_set_issuer_name(one, X509_get_subject_name(by.certificate.get()));
  auto extend = [one](int kind, const char* value) {
    X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, nullptr, kind, value);
    EXPECT_NE(extension, nullptr) << value;
    X509_add_ext(one, extension, -1);
    X509_EXTENSION_free(extension);
  };
  extend(NID_basic_constraints, wish.is_authority ? "critical,CA:TRUE" : "critical,CA:FALSE");
  if (wish.extended_usage != nullptr) extend(NID_ext_key_usage, wish.extended_usage);
  EXPECT_GT(X509_sign(one, by.key.get(), EVP_sha256()), 0);
  return made;
}

inline Issued NewAuthority(const std::string& name = "the job's CA") {
  return Issue({.name = name, .is_authority = true}, nullptr);
}

/// The options of a member with `own`, who believes `authority`.
inline base::TlsOptions CertOptions(Folder& folder, const std::string& name, const Issued& own,
                                    const Issued& authority, const std::string& between = "") {
  base::TlsOptions options;
  options.mode = base::TlsMode::kCert;
  options.certificate_file = folder.Write(name + ".pem", own.certificate_pem() + between);
  options.key_file = folder.Write(name + ".key", own.key_pem());
  options.ca_file = folder.Write(name + ".ca", authority.certificate_pem());
  return options;
}

/// Of a member like any other of its job: one for all tests of a process.
inline base::TlsOptions SharedIdentity() {
  static Folder folder;
  static const base::TlsOptions options = [] {
    const Issued authority = NewAuthority();
    return CertOptions(folder, "member", Issue({}, &authority), authority);
  }();
  return options;
}

}  // namespace Atoll::transport::testing
