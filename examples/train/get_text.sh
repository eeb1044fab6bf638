#!/bin/sh
# Fetches the training text from three Debian packages and writes one corpus file; needs apt-get, dpkg and python3,
# no root rights, and installs nothing.
#   get_text.sh [OUT_FILE]        default .text/corpus.txt
set -eu

out=${1:-.text/corpus.txt}
here=$(cd "$(dirname "$0")" && pwd)
# bible-kjv is the reader of bible-kjv-text's compressed file. The versioned names are those of Debian 12.
packages="bible-kjv-text bible-kjv ${POSTGRESQL_DOC:-postgresql-doc-15} ${PYTHON_DOC:-python3.11-doc}"

mkdir -p "$(dirname "$out")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# apt's download user must be able to write here, or apt warns.
chmod 755 "$work"

# shellcheck disable=SC2086  # the list is meant to be split
(cd "$work" && apt-get -q -o APT::Sandbox::User=root download $packages)
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$work/root"
    dpkg-deb -W --showformat='${Package} ${Version}\n' "$package"
done | sort > "$work/packages.txt"

"$work/root/usr/bin/bible" -f -p "$work/root/usr/lib" gen1:1-rev22:21 < /dev/null > "$work/bible.txt"
python3 "$here/make_corpus.py" --bible "$work/bible.txt" --docs "$work/root/usr/share/doc" --out "$out"
cp "$work/packages.txt" "$(dirname "$out")/packages.txt"
cat "$work/packages.txt"
