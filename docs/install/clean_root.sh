#!/bin/sh
# clean_root.sh ROOT PACKAGES: installs the Debian packages and the wheel of a folder in
# ROOT, a Debian 12 of mmdebstrap that has nothing else, as docs/install.md says; uses
# and removes them. Prints the seconds of each step. Needs the privileges of root;
# ./dev package --clean runs it.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)

# timed LABEL COMMAND...: set -e has no effect in a COMMAND that is a function.
timed() {
  label=$1
  shift
  begin=$(date +%s)
  "$@" >/tmp/step.log 2>&1 || {
    tail -n 50 /tmp/step.log
    echo "FAILED: $label" && exit 1
  }
  printf '%4s s  %s: %s\n' "$(($(date +%s) - begin))" "$label" "$(tail -n 1 /tmp/step.log)"
}

install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

# From nothing to a caught bug, by pip.
use_wheel() {
  python3 -m venv venv &&
    venv/bin/pip install -q packages/*.whl &&
    venv/bin/kvtwin fuzz --ops 10000 || return 2
  code=0
  venv/bin/python -m kvtwin.ci --seconds 5 --pages pages \
    docs/examples/python_tree.py:TreeCache || code=$?
  [ $code -eq 1 ] && [ -e pages/found.html ]
}

use_c() {
  # shellcheck disable=SC2046
  cc -std=c99 docs/examples/c/main.c $(pkg-config --cflags --libs kvtwin) -o pass &&
    ./pass pass.jsonl
}

use_cxx() {
  # shellcheck disable=SC2046
  c++ -std=c++20 docs/examples/link/main.cc \
    $(pkg-config --cflags --libs kvtwin-cxx) -o hello &&
    ./hello
}

use_cmake() {
  cmake -S docs/examples/link -B link && cmake --build link && link/hello
}

purge() {
  apt-get purge -y -q kvtwin libkvtwin0 libkvtwin-dev libkvtwin-cxx-dev &&
    [ -z "$(find / -xdev -name '*kvtwin*' -not -path '/work/*' \
      -not -path '/var/lib/dpkg/*' -not -path '/proc/*')" ]
}

if [ "$1" = --inside ]; then
  cd /work
  timed "apt-get update" apt-get update -q
  timed "apt install ./kvtwin_*.deb" install ./packages/kvtwin_*.deb
  timed "kvtwin fuzz" kvtwin fuzz --ops 10000
  timed "apt install gcc, pkg-config" install gcc libc6-dev pkg-config
  timed "apt install ./libkvtwin0_*.deb ./libkvtwin-dev_*.deb" \
    install ./packages/libkvtwin0_*.deb ./packages/libkvtwin-dev_*.deb
  timed "a program in C" use_c
  timed "apt install g++, cmake" install g++ cmake make
  timed "apt install ./libkvtwin-cxx-dev_*.deb" install ./packages/libkvtwin-cxx-dev_*.deb
  timed "a program in C++ by pkg-config" use_cxx
  timed "the same by CMake" use_cmake
  timed "apt purge: no file is left" purge
  timed "apt install python3-venv" install python3-venv
  timed "the wheel, to a caught bug" use_wheel
  exit
fi

root=${1:?}
rm -rf "$root/work"
mkdir -p "$root/work/docs"
cp -r "$2" "$root/work/packages"
cp -r "$here/docs/examples" "$root/work/docs/"
cp "$0" "$root/work/clean_root.sh"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
# python3-venv installs Debian's certificates; a proxy may need those of this machine.
cat /etc/ssl/certs/ca-certificates.crt >"$root/work/certificates" 2>/dev/null || true
# The mounts end with this process.
unshare --mount sh -c "mount -t proc proc '$root/proc'
  exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C \
    ${PIP_CERT:+PIP_CERT=/work/certificates} PIP_DISABLE_PIP_VERSION_CHECK=1 \
    chroot '$root' sh /work/clean_root.sh --inside"
