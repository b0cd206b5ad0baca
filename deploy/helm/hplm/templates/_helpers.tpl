{{- define "hplm.labels" -}}
app.kubernetes.io/name: hplm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The name, namespace and labels of an object. Call it with the root, a name, a component, and maybe further labels. */}}
{{- define "hplm.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "hplm.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* What all pods have. Call it with the root, its part of the values and the labels by which a pod knows its equals. */}}
{{- define "hplm.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.priorityClass }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClass }}
runtimeClassName: {{ . }}
{{- end }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.values $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .root.Values.serviceAccount }}
serviceAccountName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- .equals | nindent 8 }}
{{- end }}

{{- define "hplm.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* How a container reaches the registry. Call it with the root and a secret. Further variables may follow. */}}
{{- define "hplm.registry" -}}
{{- with .secret }}
envFrom:
  - secretRef:
      name: {{ . }}
{{- end }}
env:
  - name: HPLM_STATE
    value: {{ required "registry.address is missing: name the bucket, such as s3://bucket/hplm" .root.Values.registry.address }}
  - name: HOME
    value: /tmp
  - name: POD_NAME # for mounts with a folder of each pod
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  {{- include "hplm.extraEnv" .root | nindent 2 }}
{{- end }}

{{- define "hplm.extraEnv" -}}
{{- with .Values.extraEnv }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- define "hplm.repositoryMounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .Values.repository.claim }}
- name: repository
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{- define "hplm.mounts" -}}
{{- include "hplm.repositoryMounts" . }}
{{- with .Values.mounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "hplm.repositoryVolumes" -}}
- name: tmp
  emptyDir: {}
{{- with .Values.repository.claim }}
- name: repository
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "hplm.volumes" -}}
{{- include "hplm.repositoryVolumes" . }}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
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
  {{- include "hplm.extraEnv" .root | nindent 2 }}
resources:
  {{- toYaml .root.Values.router.resources | nindent 2 }}
securityContext:
  {{- include "hplm.containerSecurity" .root | nindent 2 }}
volumeMounts:
  {{- include "hplm.repositoryMounts" .root | nindent 2 }}
  - name: cluster
    mountPath: /etc/hplm
    readOnly: true
  - name: router-files
    mountPath: /run/router
{{- end }}

{{/* All replicas, with autoscaling all that there may ever be: those without an address yet get no requests. */}}
{{- define "hplm.cluster" -}}
{{- $pool := printf "%s-all" .Release.Name -}}
{{- $below := printf "%s.%s.svc.%s" $pool .Release.Namespace .Values.clusterDomain -}}
{{- $replicas := .Values.autoscaling.enabled | ternary .Values.pool.most .Values.pool.replicas -}}
{
  "kind": "hplm replicas",
  "format": 1,
  "repository": "/models",
  "replicas": [
    {{- range $number := until (int $replicas) }}
    {{- $host := printf "%s-%d.%s" $pool $number $below }}
    {{- if $number }},{{ end }}
    { "id": {{ add1 $number }}, "name": "{{ $pool }}-{{ $number }}", "http": "{{ $host }}:8000", "grpc": "{{ $host }}:8001" }
    {{- end }}
  ],
  "spread": {{ .Values.router.spread | toJson }}
}
{{- end }}
