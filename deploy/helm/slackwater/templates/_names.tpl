{{- define "slackwater.name" -}}
{{- if contains "slackwater" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-slackwater" .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end }}

{{/* What a part is selected by; called with (list $ "part"). */}}
{{- define "slackwater.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: slackwater
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "slackwater.labels" -}}
{{- $root := index . 0 -}}
{{ include "slackwater.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- define "slackwater.redisSecret" -}}
{{- if .Values.redis.enabled -}}{{ include "slackwater.name" . }}-redis
{{- else -}}{{ required "redis.secret: name a Secret with the url of your Redis, or set redis.enabled" .Values.redis.secret }}
{{- end -}}
{{- end }}
