# OpenSSL's headers, for TLS of lib/transport/native. Its library is loaded when TLS is asked for, so nothing is linked. Sets TAGC_HAS_TLS, and
# where that is true, OPENSSL_INCLUDE_DIR.
set(TAGC_HAS_TLS OFF)
if(NOT TAGC_HAS_NATIVE OR TAGC_TLS STREQUAL "OFF")
  return()
endif()
find_path(OPENSSL_INCLUDE_DIR openssl/ssl.h)
if(OPENSSL_INCLUDE_DIR)
  include(CheckCSourceCompiles) # headers of another processor are none
  set(CMAKE_REQUIRED_INCLUDES ${OPENSSL_INCLUDE_DIR})
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  check_c_source_compiles("#include <openssl/ssl.h>
#if OPENSSL_VERSION_NUMBER < 0x30000000L
#error too old
#endif
int tls(void) { return TLS1_3_VERSION; }" TAGC_OPENSSL_WORKS)
  unset(CMAKE_TRY_COMPILE_TARGET_TYPE)
  unset(CMAKE_REQUIRED_INCLUDES)
endif()
if(TAGC_OPENSSL_WORKS)
  set(TAGC_HAS_TLS ON)
elseif(TAGC_TLS STREQUAL "ON")
  message(FATAL_ERROR "TAGC_TLS is ON, and the headers of OpenSSL 3 or newer are missing: install libssl-dev (Debian, Ubuntu), openssl-devel "
                      "(Fedora) or openssl (conda)")
else()
  message(NOTICE "tagc: without OpenSSL's headers, so TAGC_NATIVE_TLS, which encrypts messages, will be refused; to have it, install "
                 "libssl-dev (Debian, Ubuntu), openssl-devel (Fedora) or openssl (conda), and build again")
endif()
