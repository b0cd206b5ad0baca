#!/bin/sh
# Writes the manifests of this folder from the chart in ../helm/hplm. Only the chart is edited by hand; a test compares both.
#   deploy/kubernetes/render.sh [FOLDER]        (needs helm)
set -eu
to=$(CDPATH='' cd -- "${1:-$(dirname -- "$0")}" && pwd)
cd "$(dirname -- "$0")"

render() {
    file=$to/$1
    shift
    mkdir -p "$(dirname "$file")"
    echo '# Written by deploy/kubernetes/render.sh from deploy/helm/hplm: change it there.' >"$file"
    "${HELM:-helm}" template hplm ../helm/hplm --namespace hplm "$@" >>"$file"
}

render base/hplm.yaml
render components/monitoring/monitoring.yaml --show-only templates/monitoring.yaml --set monitoring.enabled=true
render components/keda/keda.yaml --show-only templates/keda.yaml --set autoscaling.with=keda
render components/hpa/hpa.yaml --show-only templates/hpa.yaml --set autoscaling.with=hpa
render components/renewal/renewal.yaml --show-only templates/renewal.yaml --set renewal.enabled=true \
    --set journals.claim=hplm-journals
