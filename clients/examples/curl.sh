#!/bin/sh
# Plain curl, JSON in and out.
#
#     sh curl.sh --url 127.0.0.1:8000 --tenant acme "some text"
set -eu

url=127.0.0.1:8000 backbone=minilm tenant='' key='' timeout=2 text='some text'
while [ $# -gt 0 ]; do
    case $1 in
    --url) url=$2 && shift 2 ;;
    --backbone) backbone=$2 && shift 2 ;;
    --tenant) tenant=$2 && shift 2 ;;
    --key) key=$2 && shift 2 ;;
    --timeout) timeout=$2 && shift 2 ;;
    *) text=$1 && shift ;;
    esac
done

# Escapes quotes, backslashes and control characters, byte by byte.
quoted() {
    printf '%s' "$1" | od -An -v -tu1 |
        LC_ALL=C awk '{ for (i = 1; i <= NF; i++) printf(($i < 32 || $i == 34 || $i == 92) ? "\\u%04x" : "%c", $i + 0) }'
}

# "timeout" in the JSON is the deadline in microseconds, counted from the request's arrival.
curl --silent --show-error --fail-with-body --max-time "$timeout" ${key:+--header "Authorization: Bearer $key"} \
    "http://$url/v2/models/$backbone/infer" --data-binary @- <<JSON
{
  "parameters": {"tenant": "$(quoted "$tenant")", "timeout": 200000, "outputs": "LABEL,SCORE,SPAN,VERSION"},
  "inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["$(quoted "$text")"]}],
  "outputs": [{"name": "LABEL"}, {"name": "SCORE"}, {"name": "SPAN"}, {"name": "VERSION"}]
}
JSON
echo
