# Compiler settings and the three ways to declare something built. One folder is one library; it is
# named atoll_<folder> and used as Atoll::<folder>.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O2")  # Asserts stay: a broken invariant must not train on.
set(ATOLL_CXX_OPTIONS -Wall -Wextra -Wno-unused-parameter -fno-omit-frame-pointer -g1)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${ATOLL_CXX_OPTIONS}>")

find_program(ATOLL_CCACHE ccache)
if(ATOLL_CCACHE)
  # Paths are rewritten relative to the build folder, so that build folders beside each other share.
  set(CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${ATOLL_CCACHE})
endif()
find_program(ATOLL_MOLD mold)
if(ATOLL_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
if(ATOLL_SANITIZER)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${ATOLL_SANITIZER};-fno-sanitize-recover=all>")
  add_link_options(-fsanitize=${ATOLL_SANITIZER})
  if(ATOLL_SANITIZER MATCHES undefined)
    # Its check of dynamic types opens a pipe, and takes every object for a wrong one where descriptors ran out, as
    # they do in tests.
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=vptr>")
  endif()
endif()
if(ATOLL_SANITIZER STREQUAL thread)
  # tsan_abseil.cc says why: each of its functions is put in front of Abseil's of that name.
  file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/tsan_abseil.cc atoll_wrapped REGEX "^ATOLL_WRAP")
  list(TRANSFORM atoll_wrapped REPLACE "^ATOLL_WRAP[(][a-z]+, ([A-Za-z0-9_]+),.*" "-Wl,--wrap=\\1")
  add_library(atoll_tsan_abseil OBJECT ${CMAKE_CURRENT_LIST_DIR}/tsan_abseil.cc)
  add_link_options(${atoll_wrapped})
endif()

# atoll_library(<folder> SOURCES ... [DEPS targets linked and exposed] [PRIVATE_DEPS ...])
function(atoll_library folder)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(atoll_${folder} STATIC ${ARG_SOURCES})
  add_library(Atoll::${folder} ALIAS atoll_${folder})
  set_target_properties(atoll_${folder} PROPERTIES EXPORT_NAME ${folder})
  target_include_directories(atoll_${folder} PUBLIC
    $<BUILD_INTERFACE:${CMAKE_BINARY_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(atoll_${folder} PUBLIC cxx_std_20)
  target_link_libraries(atoll_${folder} PUBLIC ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  set_property(GLOBAL APPEND PROPERTY ATOLL_LIBRARIES atoll_${folder})
endfunction()

# atoll_binary(<name> [NO_INSTALL] SOURCES ... DEPS ...)
function(atoll_binary name)
  cmake_parse_arguments(ARG "NO_INSTALL" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} $<TARGET_NAME_IF_EXISTS:atoll_tsan_abseil>)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
  if(NOT ARG_NO_INSTALL)
    set_property(GLOBAL APPEND PROPERTY ATOLL_BINARIES ${name})
  endif()
endfunction()

# atoll_test(<name> SOURCES ... DEPS ... [LABELS unit|integration|gpu|slow ...] [TIMEOUT seconds])
# One GoogleTest binary; one ctest entry (loading LibTorch costs 0.6 s a process). TIMEOUT is a hang
# limit, ten times what the test takes. A case that cannot run here skips itself, with GTEST_SKIP() <<
# "ATOLL_TEST_SKIPPED: why"; ctest says "Skipped" where no case could run (tests/main.cc).
set(ATOLL_SKIP_CODE 77)
function(atoll_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} atoll_test_main
    $<TARGET_NAME_IF_EXISTS:atoll_tsan_abseil>)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(ATOLL_SANITIZER)
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")
  endif()
  if("integration" IN_LIST ARG_LABELS)  # It starts processes: ctest runs it alone on a small machine.
    set_tests_properties(${name} PROPERTIES PROCESSORS 2)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} SKIP_RETURN_CODE ${ATOLL_SKIP_CODE})
endfunction()
