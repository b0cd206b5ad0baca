{{- define "hplm.labels" -}}
app.kubernetes.io/name: hplm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hplm.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "hplm.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A container that keeps /state a copy of the manager's. Call it with the root and a list of further arguments. */}}
{{- define "hplm.follower" -}}
image: {{ .root.Values.images.hplm }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
command: [hplm, follow]
args:
  - --from=http://{{ .root.Release.Name }}-manager:8080
  - --repository=/models
  - --state=/state
  - --token-file=/secrets/source/token
  - --name=$(POD_NAME)
  {{- range .more }}
  - {{ . }}
  {{- end }}
env:
  - name: POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: HOME
    value: /tmp
resources:
  {{- toYaml .root.Values.sidecar.resources | nindent 2 }}
securityContext:
  {{- include "hplm.containerSecurity" .root | nindent 2 }}
volumeMounts:
  - name: repository
    mountPath: /models
    readOnly: true
  - name: state
    mountPath: /state
  - name: source-token
    mountPath: /secrets/source
    readOnly: true
  - name: tmp
    mountPath: /tmp
{{- end }}

{{- define "hplm.followerVolumes" -}}
- name: repository
  persistentVolumeClaim:
    claimName: {{ .Values.repository.claim }}
    readOnly: true
- name: state # a volume of the pod: of an emptyDir, a follower sees the node's free space and not the limit
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .Values.pool.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .Values.pool.stateSize }}
- name: source-token
  secret:
    secretName: {{ .Values.secrets.source }}
    defaultMode: 0440
- name: tmp
  emptyDir: {}
{{- end }}

{{/* An inference through every model (--once: ready, --alive). Triton itself calls a model ready whose process is dead. */}}
{{- define "hplm.probe" -}}
exec:
  command: [hplm, watch, {{ . }}]
timeoutSeconds: 20
{{- end }}

{{/* More replicas at once, fewer of them slowly: a replica begins with cold tables and empty slots. */}}
{{- define "hplm.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - type: Percent
      value: 100
      periodSeconds: 60
scaleDown:
  stabilizationWindowSeconds: 600
  policies:
    - type: Pods
      value: 1
      periodSeconds: 300
{{- end }}

{{/* A container that writes the router's files. Call it with the root and a list of further arguments. */}}
{{- define "hplm.route" -}}
image: {{ .root.Values.images.hplm }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
command: [hplm, route]
args:
  - --cluster=/etc/hplm/cluster.json
  - --to=/run/router
  {{- range .more }}
  - {{ . }}
  {{- end }}
env:
  - name: HOME
    value: /tmp
resources:
  {{- toYaml .root.Values.sidecar.resources | nindent 2 }}
securityContext:
  {{- include "hplm.containerSecurity" .root | nindent 2 }}
volumeMounts:
  - name: repository
    mountPath: /models
    readOnly: true
  - name: state # not read-only: `--watch` writes into it which generation HAProxy has
    mountPath: /state
  - name: cluster
    mountPath: /etc/hplm
    readOnly: true
  - name: router-files
    mountPath: /run/router
  - name: tmp
    mountPath: /tmp
{{- end }}

{{/* All replicas that there may ever be: those that are not there answer no check, and get no requests. */}}
{{- define "hplm.cluster" -}}
{{- $pool := printf "%s-%s" .Release.Name .Values.pool.name -}}
{{- $below := printf "%s.%s.svc.%s" $pool .Release.Namespace .Values.clusterDomain -}}
{
  "kind": "hplm replicas",
  "format": 1,
  "state": "/state",
  "pools": [
    {
      "name": {{ .Values.pool.name | quote }},
      "repository": "/models",
      "replicas": [
        {{- range $number := until (int .Values.pool.most) }}
        {{- $host := printf "%s-%d.%s" $pool $number $below }}
        {{- if $number }},{{ end }}
        { "id": {{ add1 $number }}, "name": "{{ $pool }}-{{ $number }}", "http": "{{ $host }}:8000", "grpc": "{{ $host }}:8001" }
        {{- end }}
      ]
    }
  ]
}
{{- end }}
