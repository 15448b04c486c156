# zig's clang for one target, with the headers and stubs of its C library: what is built runs with that C library and newer ones,
# whatever this machine has. scripts/wheels.sh sets the variables of the environment.
set(target "$ENV{TAGC_ZIG_TARGET}") # as in aarch64-linux-gnu.2.17
string(REGEX MATCH "^[^-]+" processor "${target}")
if(NOT processor STREQUAL "${CMAKE_HOST_SYSTEM_PROCESSOR}")
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR ${processor})
endif()
set(CMAKE_C_COMPILER "$ENV{TAGC_ZIG}" cc -target ${target})
set(CMAKE_AR "$ENV{TAGC_ZIG_TOOLS}/ar")
set(CMAKE_RANLIB "$ENV{TAGC_ZIG_TOOLS}/ranlib")
if(NOT TAGC_LIBUV_SOURCE)
  set(TAGC_NATIVE OFF CACHE STRING "") # not from /usr, where this machine's own C library is
endif()
set(TAGC_TLS OFF CACHE STRING "") # likewise
