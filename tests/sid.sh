#!/usr/bin/env bash
# Downloads newer database servers, or a Python, from Debian sid into a private folder: tests/sid.sh mysql9.7 mariadb11.8
#
# Each of them gets a root of its own, ${XDG_CACHE_HOME:-~/.cache}/aiolock/NAME, with its own C library, and programs in
# its folder `bin` that start by that library's loader. apt runs with lists, status and cache of that folder: the
# machine's packages, sources and lists stay as they are, and no root rights are needed. The mirror is that of the
# machine's own apt sources. Nothing is done for one that is there already. Prints the folder of each. The Python, python3.14,
# is bin/python3.14 there and makes environments whose programs start by the same loader (tests/pythons.sh).
set -euo pipefail
umask 022

give_up() {
    echo "$0: $*" >&2
    exit 1
}

# The programs of a root are started by that root's own loader and libraries.
wrap() { # ROOT PROGRAM WRAPPER [OPTION...]
    local root=$1 program=$2 wrapper=$3 loader libraries
    shift 3
    loader=$(find -H "$root/usr" -name 'ld-linux*.so.*' -print -quit)
    [ -n "$loader" ] || give_up "$root has no loader (ld-linux*.so)"
    libraries=$(dirname "$(find "$root/usr/lib" -name 'libc.so.6' -print -quit)")
    printf '#!/bin/sh\nexec %q --library-path %q %q "$@" %s\n' \
        "$loader" "$libraries" "$program" "$*" >"$wrapper"
    chmod 755 "$wrapper"
}

# Creates $new/usr out of the packages that PACKAGE needs on a machine that has none.
unpack() { # PACKAGE VERSION
    local package=$1 version=$2 have
    mkdir -p "$new"/apt/{lists,cache/archives}/partial
    : >"$new/apt/status"
    echo "deb ${signed:+[signed-by=$signed] }$mirror sid main" >"$new/apt/sources.list"
    local apt=(apt-get -q -o "Dir::Etc::sourcelist=$new/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferencesparts=/dev/null -o Dir::Etc::preferences=/dev/null
        -o "Dir::State::lists=$new/apt/lists" -o "Dir::State::status=$new/apt/status"
        -o "Dir::State::extended_states=$new/apt/extended_states" -o "Dir::Cache=$new/apt/cache"
        -o "Dir::Log=$new/apt" -o APT::Update::Error-Mode=any -o Debug::NoLocking=1 -o APT::Sandbox::User= -o Acquire::Languages=none
        -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
    "${apt[@]}" update >"$new/apt/log" 2>&1 ||
        give_up "apt-get could not read the lists of sid at $mirror: $(tail -n 1 "$new/apt/log")"
    have=$("${apt[@]}" --print-uris -y --no-install-recommends install "$package" 2>>"$new/apt/log" |
        sed -n "s|.*/${package}_\([0-9.]*\).*|\1|p") || true
    case $have in
        "$version" | "$version".*) ;;
        '') give_up "Debian sid at $mirror has no package $package for this machine" ;;
        *) give_up "Debian sid has $package $have now, no longer $version: name that version in $0 and the Makefile" ;;
    esac
    echo "Downloading $package $have and what it needs from $mirror to $new" >&2
    "${apt[@]}" -y --no-install-recommends --download-only install "$package" >>"$new/apt/log" 2>&1 ||
        give_up "apt-get could not download $package from $mirror: $(tail -n 1 "$new/apt/log")"
    # Packages of sid expect /lib to be a link to /usr/lib, which tar would follow only if it were there before.
    mkdir -p "$new"/usr/{bin,sbin,lib,lib64}
    ln -s usr/bin usr/sbin usr/lib usr/lib64 "$new"
    local deb
    for deb in "$new"/apt/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink --no-same-owner -C "$new" ||
            give_up "$deb could not be unpacked"
    done
    rm -rf "$new/apt"
}

for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || give_up "$tool is missing: the servers come as Debian packages"
done
# Debian's main archive, as this machine reaches it; a mirror of another distribution has no sid.
mirror=$(apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(SITE)' 'Created-By: Packages' 2>/dev/null |
    sed -n 's/^Debian|Debian|//p' | head -n 1)
[ -n "$mirror" ] || give_up "this machine's apt sources name no Debian mirror (or \`apt-get update\` never ran)"
signed=
for keyring in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do
    [ -n "$signed" ] || [ ! -e "$keyring" ] || signed=$keyring
done

for name in "$@"; do
    case $name in
        mysql9.7) package=mysql-server-core version=9.7 server=mysqld ;;
        mariadb11.8) package=mariadb-server-core version=1:11.8 server=mariadbd ;;
        python3.14) package=python3.14-venv version=3.14 server=python3.14 ;;
        *) give_up "'$name' is neither mysql9.7, mariadb11.8 nor python3.14" ;;
    esac
    home=${XDG_CACHE_HOME:-$HOME/.cache}/aiolock
    root=$home/$name
    mkdir -p "$home"
    # One at a time, and whole or not at all: another run may ask for the same server.
    exec 9>"$home/lock"
    flock 9
    version_of=("$root/bin/$server" --no-defaults --version)
    [ "$server" != python3.14 ] || version_of=("$root/bin/$server" --version)
    if [ ! -x "$root/bin/$server" ] || ! "${version_of[@]}" >/dev/null 2>&1; then
        rm -rf "$root"
        new=$root
        trap 'rm -rf "$new"' EXIT
        unpack "$package" "${version#*:}"
        : >"$root/log"
        rm -f "$root/bin" # the link for the packages; these are the programs to call
        mkdir "$root/bin"
        if [ "$server" = python3.14 ]; then
            wrap "$root" "$root/usr/bin/$server" "$root/bin/$server"
            # Python finds its environment by the name it was called by; the wheel of pip is in this root.
            sed -i 's| --library-path | --argv0 "$0"&|' "$root/bin/$server"
            sed -i "s|/usr/share/python-wheels|$root&|" "$root"/usr/lib/python3.14/_sysconfigdata_*.py
        else
            wrap "$root" "$root/usr/sbin/$server" "$root/bin/$server" "--basedir=$root/usr"
        fi
        if [ "$server" = mariadbd ]; then
            # The installer is a shell script that calls programs of its base directory, which need the loader as well.
            mkdir -p "$root/base/"{bin,sbin,lib}
            ln -s "$root/usr/share" "$root/base/share"
            ln -s "$root/usr/lib/mysql" "$root/base/lib/mysql"
            for program in sbin/mariadbd bin/my_print_defaults bin/resolveip; do
                wrap "$root" "$root/usr/$program" "$root/base/$program"
            done
            printf '#!/bin/sh\nexec /bin/sh %q "$@" %q\n' "$root/usr/bin/mariadb-install-db" "--basedir=$root/base" \
                >"$root/bin/mariadb-install-db"
            chmod 755 "$root/bin/mariadb-install-db"
        fi
        "${version_of[@]}" >"$root/log" 2>&1 ||
            give_up "$server of $package does not run here: $(tail -n 1 "$root/log")"
        trap - EXIT
    fi
    exec 9>&-
    echo "$root"
done
