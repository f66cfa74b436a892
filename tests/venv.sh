#!/usr/bin/env bash
# Makes a virtual environment whose pip knows dependency groups: tests/venv.sh DIRECTORY [PYTHON]
#
# Takes PYTHON if it is new enough, else the first of the usual names that is.
set -euo pipefail
directory=$1
for python in "${2:-python3}" python3.11 python3.12 python3.13 python3.14 ""; do
    if [ -z "$python" ]; then
        echo "aiolock needs Python 3.11 or newer, and '${2:-python3}' is not. Install it (Debian 12: apt-get install" \
            "python3 python3-venv), or name it: make PYTHON=/path/to/python3.11 ..." >&2
        exit 1
    fi
    if version=$("$python" -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit(1); print("%d.%d" % v[:2])' 2>/dev/null); then
        break
    fi
done

# Debian keeps ensurepip, which `venv` needs, in a package of its own.
"$python" -c 'import ensurepip' 2>/dev/null || "$(dirname "$0")/install.sh" "python$version-venv"

echo "Making $directory with Python $version ($python)"
trap 'rm -rf "$directory"' ERR INT TERM # half an environment would look like a whole one next time
"$python" -m venv --clear "$directory"
"$directory/bin/python" -m pip install --quiet --upgrade "pip>=25.1" # the first that installs dependency groups
