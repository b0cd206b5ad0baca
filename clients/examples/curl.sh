#!/bin/sh
# Plain curl, JSON in and out. HPLM_API_KEY may hold the tenant's key.
#
#     sh curl.sh 127.0.0.1:8000 minilm acme "some text"
set -eu

url=$1 backbone=$2 tenant=$3 text=$4 key=${HPLM_API_KEY:-}

# Escapes quotes, backslashes and control characters, byte by byte.
quoted() {
    printf '%s' "$1" | od -An -v -tu1 |
        LC_ALL=C awk '{ for (i = 1; i <= NF; i++) printf(($i < 32 || $i == 34 || $i == 92) ? "\\u%04x" : "%c", $i + 0) }'
}

# "timeout" in the JSON is the deadline in microseconds, counted from the request's arrival.
curl --silent --show-error --fail-with-body --max-time 60 ${key:+--header "Authorization: Bearer $key"} \
    "http://$url/v2/models/$backbone/infer" --data-binary @- <<JSON
{
  "outputs": [{"name": "LABEL"}, {"name": "SCORE"}, {"name": "SPAN"}, {"name": "VERSION"}],
  "parameters": {"tenant": "$(quoted "$tenant")", "timeout": 200000, "outputs": "LABEL,SCORE,SPAN,VERSION"},
  "inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["$(quoted "$text")"]}]
}
JSON
echo
