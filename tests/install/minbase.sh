#!/usr/bin/env bash
# README's first commands on a fresh Debian: a root of `debootstrap --variant=minbase` with python3-venv, git, make and gcc, and a clone. Once as a newcomer
# with pip, who installs nothing else, then what `make check` begins with, all other commands of README and the guide (tests/python/door.py), and `make demo`.
# Prints the packages that it began and ended with. Exit 77: no debootstrap, not root, or no mirror and no PyPI that answer. The root is deleted at the end.
#   minbase.sh <sources>         TAGC_MIRROR: of Debian; TAGC_WITHOUT=torch,build,demo leaves these out
set -euo pipefail
source=$(cd "$1" && pwd)
skip() {
    echo "skipped: $*"
    exit 77
}
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || skip "not root, as debootstrap must be"
command -v debootstrap unshare >/dev/null || skip "no debootstrap"
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
mirror=${TAGC_MIRROR:-http://deb.debian.org/debian}
base=(python3-venv git make gcc libc6-dev ca-certificates) # the last two are what apt installs beside gcc and git
without=,${TAGC_WITHOUT:-},

root=$(mktemp -d /tmp/tagc-minbase.XXXXXX)
trap 'rm -rf --one-file-system "$root"' EXIT
timeout 900 debootstrap --variant=minbase --include="$(IFS=, && echo "${base[*]}")" "$suite" "$root" "$mirror" >"$root.log" 2>&1 ||
    { tail -n 3 "$root.log"; rm -f "$root.log"; skip "debootstrap of $suite from $mirror failed"; }
rm -f "$root.log"
# How this machine reaches its mirrors and PyPI: names, pip's and apt's settings, certificates.
for path in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/apt/apt.conf.d /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/trusted.gpg.d /etc/ssl/certs \
    "${PIP_CERT:-}" "${SSL_CERT_FILE:-}"; do
    if [ -n "$path" ] && [ -e "$path" ]; then
        mkdir -p "$root$(dirname "$path")"
        cp -aLT "$path" "$root$path" 2>/dev/null || true
    fi
done
mkdir -p "$root/clone"
(cd "$source" && git ls-files -z | tar --null -T - -cf -) | tar -C "$root/clone" -xf -

inside() { # <limit in seconds> <command>: in a shell of the root, with a /proc and processes of its own
    timeout "$1" unshare -m -p -f --kill-child chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
        "${kept[@]}" bash -c "mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && cd /clone && $2"
}
mapfile -t kept < <(env | grep -E '^(PIP_|SSL_CERT|REQUESTS_CA|CURL_CA|https?_proxy|no_proxy|HTTPS?_PROXY|NO_PROXY)')
mkdir -p "$root/dev/shm"
command_of_newcomer() { # <limit in seconds> <command>
    local start=$SECONDS
    echo "\$ $2"
    inside "$@" >"$root/said" 2>&1 || { tail -n 40 "$root/said"; fail "$2"; }
    tail -n "${tail:-3}" "$root/said"
    echo "  ($((SECONDS - start)) s)"
}
packages() { inside 60 "dpkg-query -W -f '\${Package} '"; }

echo "packages: $(packages)"
inside 200 "python3 -m venv /env && /env/bin/pip download --no-deps -d /tmp scikit-build-core" >"$root/said" 2>&1 || { tail -n 3 "$root/said"; skip "PyPI does not answer"; }
! inside 60 "ls /usr/include/{xxhash,uv,openblas_config}.h" >/dev/null 2>&1 || fail "it is no fresh machine"
command_of_newcomer 600 ". /env/bin/activate && pip install . && python -m tagc plan --link 1gbit --codec-ns 1"
command_of_newcomer 60 ". /env/bin/activate && python -m tagc info"
case $without in
*,torch,*) ;;
*)
    # README's line, and two ranks of its example.
    command_of_newcomer 1500 ". /env/bin/activate && pip install '.[torch]' && python -m tagc plan --codec-ns 1"
    command_of_newcomer 600 ". /env/bin/activate && torchrun --standalone --nproc-per-node 2 examples/pytorch/train_gpt.py --steps 2 --n-layer 1 --n-embd 32"
    grep -q 'tagc: messages go by gloo.*libuv1-dev' "$root/said" || fail "it does not say once what it lacks"
    ;;
esac
case $without in *,build,*) ;; *) command_of_newcomer 1500 "make lib && make build && build/tagc --help" ;; esac
case $without in
*,build,*) ;;
*)
    # As root, into /usr/local: programs find the library without a word, and nothing of it is left in the end.
    command_of_newcomer 300 "make install && cd / && tagc version && printf '%s\\n' '#include <tagc/tagc.h>' '#include <stdio.h>' \
        'int main(void) { return puts(tagc_version()) < 0; }' >/tmp/program.c && gcc /tmp/program.c -ltagc -o /tmp/program && /tmp/program"
    grep -q 'install: programs find libtagc.so in /usr/local/lib' "$root/said" || fail "make install as root does not say that programs find the library"
    command_of_newcomer 60 "make uninstall && ! ls -d /usr/local/lib/libtagc* /usr/local/include/tagc /usr/local/bin/tagc 2>/dev/null"
    ;;
esac
case $without in
*,torch,* | *,build,*) ;;
*) # All other commands of README and the guide.
    tail=20 command_of_newcomer 2400 ". /env/bin/activate && pip install packaging && git init -q && git add -A && \
        python tests/python/door.py /clone /tmp/door build/tagc"
    grep -q 'commands of .* pages' "$root/said" || fail "door.py has not run"
    ;;
esac
case $without in *,demo,*) ;; *) tail=20 command_of_newcomer 1200 "DEMO_STEPS=${DEMO_STEPS:-30} make demo" ;; esac
echo "packages at the end: $(packages)"
echo passed
