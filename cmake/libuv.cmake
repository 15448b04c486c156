# libuv, for lib/transport/native. Sets TAGC_HAS_NATIVE, and where that is true:
#   libuv           what sources that include uv.h link
#   LIBUV_LIBRARY   the system's library, which a program that uses libtagc.a links, too; empty where libuv is compiled in
#   LIBUV_OBJECTS   what is compiled in
set(TAGC_HAS_NATIVE OFF)
set(LIBUV_LIBRARY "")
set(LIBUV_OBJECTS "")
if(TAGC_NATIVE STREQUAL "OFF")
  return()
endif()

if(TAGC_LIBUV_SOURCE)
  if(NOT EXISTS ${TAGC_LIBUV_SOURCE}/src/unix/linux.c)
    message(FATAL_ERROR "TAGC_LIBUV_SOURCE is \"${TAGC_LIBUV_SOURCE}\", which has no src/unix/linux.c: libuv 1.45 or newer is needed")
  endif()
  set(sources "") # of Linux, since 1.45
  foreach(name fs-poll idna inet random strscpy strtok thread-common threadpool timer uv-common uv-data-getter-setters version
               unix/async unix/core unix/dl unix/fs unix/getaddrinfo unix/getnameinfo unix/linux unix/loop unix/loop-watcher
               unix/pipe unix/poll unix/process unix/procfs-exepath unix/proctitle unix/random-devurandom unix/random-getrandom
               unix/random-sysctl-linux unix/signal unix/stream unix/tcp unix/thread unix/tty unix/udp)
    list(APPEND sources ${TAGC_LIBUV_SOURCE}/src/${name}.c)
  endforeach()
  add_library(libuv_compiled STATIC ${sources})
  target_include_directories(libuv_compiled SYSTEM PUBLIC ${TAGC_LIBUV_SOURCE}/include)
  target_include_directories(libuv_compiled PRIVATE ${TAGC_LIBUV_SOURCE}/src)
  target_compile_options(libuv_compiled PRIVATE -w)
  target_link_libraries(libuv_compiled PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
  add_library(libuv ALIAS libuv_compiled)
  set(LIBUV_OBJECTS $<TARGET_OBJECTS:libuv_compiled>)
  set(TAGC_HAS_NATIVE ON)
  return()
endif()

find_path(LIBUV_INCLUDE_DIR uv.h)
find_library(LIBUV_FOUND_LIBRARY uv)
if(LIBUV_INCLUDE_DIR AND LIBUV_FOUND_LIBRARY)
  include(CheckCSourceCompiles) # a library of another processor is none
  set(CMAKE_REQUIRED_INCLUDES ${LIBUV_INCLUDE_DIR})
  set(CMAKE_REQUIRED_DEFINITIONS -D_GNU_SOURCE)
  set(CMAKE_REQUIRED_LIBRARIES ${LIBUV_FOUND_LIBRARY})
  check_c_source_compiles("#include <uv.h>
#if UV_VERSION_HEX < 0x012a00
#error too old
#endif
int main(void) { return (int)uv_version(); }" TAGC_LIBUV_WORKS)
  unset(CMAKE_REQUIRED_INCLUDES)
  unset(CMAKE_REQUIRED_DEFINITIONS)
  unset(CMAKE_REQUIRED_LIBRARIES)
endif()
if(TAGC_LIBUV_WORKS)
  add_library(libuv INTERFACE)
  target_include_directories(libuv SYSTEM INTERFACE ${LIBUV_INCLUDE_DIR})
  target_link_libraries(libuv INTERFACE ${LIBUV_FOUND_LIBRARY})
  set(LIBUV_LIBRARY ${LIBUV_FOUND_LIBRARY})
  set(TAGC_HAS_NATIVE ON)
elseif(TAGC_NATIVE STREQUAL "ON")
  message(FATAL_ERROR "TAGC_NATIVE is ON, and libuv 1.42 or newer is missing: install libuv1-dev (Debian, Ubuntu), libuv-devel (Fedora) "
                      "or libuv (conda), or pass -DTAGC_LIBUV_SOURCE=<folder of its sources>")
else()
  message(NOTICE "tagc: without libuv, so PyTorch's messages go by gloo, which takes longer; to have them by TCP of its own, install "
                 "libuv1-dev (Debian, Ubuntu), libuv-devel (Fedora) or libuv (conda), and build again")
endif()
