# Debian's cross compiler for aarch64; programs of the build run under qemu-user. scripts/aarch64.sh sets TAGC_SYSROOT to a
# folder with the packages that tests need.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TAGC_SYSROOT)
set(CMAKE_CROSSCOMPILING_EMULATOR
    "qemu-aarch64;-L;/usr/aarch64-linux-gnu;-E;LD_LIBRARY_PATH=${TAGC_SYSROOT}/usr/lib/aarch64-linux-gnu")
set(ENV{PKG_CONFIG_SYSROOT_DIR} "${TAGC_SYSROOT}")
set(ENV{PKG_CONFIG_LIBDIR} "${TAGC_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig")
