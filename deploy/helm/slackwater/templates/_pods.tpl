{{/* What pods of all services share; called with (list $ "part"). */}}
{{- define "slackwater.podMeta" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "slackwater.labels" . | nindent 2 }}
annotations:
  # New settings are new pods.
  slackwater/settings: {{ $root.Values.settings | toJson | sha256sum | trunc 16 }}
  {{- if and $root.Values.metrics.port $root.Values.metrics.annotations }}
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ $root.Values.metrics.port | quote }}
  {{- end }}
  {{- with $root.Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "slackwater.podSpec" -}}
{{- $root := index . 0 -}}
serviceAccountName: {{ include "slackwater.name" $root }}
automountServiceAccountToken: false
# A service named …-http would set SLACKWATER_HTTP_PORT to tcp://…, which is a setting's name.
enableServiceLinks: false
# Process 1 is then the pod's own: as process 1, Python ignores a SIGTERM that comes while it loads.
shareProcessNamespace: true
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "slackwater.container" -}}
{{- $root := index . 0 -}}
image: "{{ $root.Values.image.repository }}:{{ $root.Values.image.tag }}"
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
envFrom:
  - configMapRef:
      name: {{ include "slackwater.name" $root }}-settings
{{- $gateway := eq (index . 1) "gateway" }}
{{- if or $gateway $root.Values.metrics.port }}
ports:
  {{- if $gateway }}
  - name: http
    containerPort: 8000
  {{- end }}
  {{- if $root.Values.metrics.port }}
  - name: metrics
    containerPort: {{ $root.Values.metrics.port }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "slackwater.env" -}}
{{- $root := index . 0 -}}
- name: SLACKWATER_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "slackwater.redisSecret" $root }}
      key: url
{{- end }}

{{/*
A check by common.health. A Redis that is away is no reason to start a worker again: it would load
its model anew and find no Redis either.
*/}}
{{- define "slackwater.check" -}}
exec:
  command:
    - sh
    - -c
    - |
      said=$(python -m common.health {{ . }}); echo "$said"
      case $said in healthy:*|*"Redis is away"*) exit 0;; esac; exit 1
# Each check starts a Python, a third of a second of a core.
timeoutSeconds: 15
{{- end }}
