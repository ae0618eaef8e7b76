{{/*
The objects of the chart are those of deploy/kubernetes: `source` links to its files. A template reads a file, gives its
objects the names and labels of the release, changes what the values say, and writes them. Nothing is written twice, so
chart and overlays cannot differ; tests/deploy/test_chart.py compares them.
*/}}

{{- define "inflight.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "inflight" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-inflight" (.Release.Name | trunc 31 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object, beside those of the sources. */}}
{{- define "inflight.labels" -}}
app.kubernetes.io/name: inflight
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: inflight
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "inflight.selector" -}}
app.kubernetes.io/name: inflight
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* The Secret of a kind (the keys of `secrets`): the release's own name, or the one that the values give. */}}
{{- define "inflight.secret" -}}
{{- get .root.Values.secrets .kind | default (printf "%s-%s" (include "inflight.fullname" .root) (kebabcase .kind)) -}}
{{- end -}}

{{/* The name of a PriorityClass, which belongs to the whole cluster: with the namespace, so that no other release has it. */}}
{{- define "inflight.priorityClass" -}}
{{- printf "%s.%s-%s" .root.Release.Namespace (include "inflight.fullname" .root) .kind -}}
{{- end -}}

{{/* A source file with the release's names, labels in selectors, and Secrets. `root`, `file`. */}}
{{- define "inflight.text" -}}
{{- $full := include "inflight.fullname" .root -}}
{{- $release := .root.Release.Name | quote -}}
{{- $text := .root.Files.Get (printf "source/%s" .file) -}}
{{- if not $text }}{{ fail (printf "source/%s is not in the chart" .file) }}{{ end -}}
{{- $text = regexReplaceAll "app\\.kubernetes\\.io/name: inflight([,}])" $text (printf "app.kubernetes.io/name: inflight, app.kubernetes.io/instance: %s${1}" $release) -}}
{{- $text = $text | replace "podSelector: {}" (printf "podSelector: {matchLabels: {app.kubernetes.io/name: inflight, app.kubernetes.io/instance: %s}}" $release) -}}
{{- /* The names of labels stay. */ -}}
{{- $text = $text | replace "inflight-client: \"true\"" "CLIENT-LABEL" | replace "inflight-pool" "POOL-LABEL" -}}
{{- /* The name in the routers' certificate. */ -}}
{{- $text = $text | replace "SERVER_NAME, value: inflight-router" "CERTIFIED-NAME" -}}
{{- $text = $text | replace "inflight-" (printf "%s-" $full) -}}
{{- $text = regexReplaceAll "(?m)^  name: inflight$" $text (printf "  name: %s" $full) -}}
{{- $text = $text | replace "kind: Issuer, name: inflight}" (printf "kind: Issuer, name: %s}" $full) -}}
{{- $text = $text | replace "CERTIFIED-NAME" "SERVER_NAME, value: inflight-router" -}}
{{- $text = $text | replace "CLIENT-LABEL" "inflight-client: \"true\"" | replace "POOL-LABEL" "inflight-pool" -}}
{{- range $kind, $name := .root.Values.secrets -}}
{{- if $name -}}
{{- $own := printf "%s-%s" $full (kebabcase $kind) -}}
{{- $text = regexReplaceAll (printf "(secretKeyRef: {name|secretName): %s([,\\n}])" $own) $text (printf "${1}: %s${2}" $name) -}}
{{- end -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* The objects of a source file, as {items: […]} in JSON. `text` in place of `file` is a text of inflight.text. */}}
{{- define "inflight.objects" -}}
{{- $text := "" -}}
{{- if .text }}{{ $text = .text }}{{ else }}{{ $text = include "inflight.text" . }}{{ end -}}
{{- $root := .root -}}
{{- $items := list -}}
{{- range $part := splitList "\n---\n" $text -}}
{{- $object := fromYaml $part -}}
{{- if hasKey $object "Error" }}{{ fail (get $object "Error") }}{{ end -}}
{{- $_ := set $object.metadata "labels" (merge ($object.metadata.labels | default dict) (include "inflight.labels" $root | fromYaml)) -}}
{{- $items = append $items $object -}}
{{- end -}}
{{- dict "items" $items | toJson -}}
{{- end -}}

{{/* Writes an object. NetworkPolicies only where they are enabled. `root`, `object`. */}}
{{- define "inflight.write" -}}
{{- if or (ne .object.kind "NetworkPolicy") .root.Values.networkPolicy.enabled }}
---
{{ toYaml .object }}
{{ end -}}
{{- end -}}

{{/* Writes all objects of a file as they are. */}}
{{- define "inflight.writeFile" -}}
{{- $root := .root -}}
{{- range $object := (include "inflight.objects" . | fromJson).items -}}
{{- include "inflight.write" (dict "root" $root "object" $object) -}}
{{- end -}}
{{- end -}}

{{/* The settings of a process: a .env file, then the values; null removes one. `root`, `file`, `settings`. JSON. */}}
{{- define "inflight.environment" -}}
{{- $full := include "inflight.fullname" .root -}}
{{- $found := dict -}}
{{- range $line := splitList "\n" (.root.Files.Get (printf "source/%s" .file)) -}}
{{- if contains "=" $line -}}
{{- $pair := splitn "=" 2 $line -}}
{{- $_ := set $found $pair._0 ($pair._1 | replace "///inflight-" (printf "///%s-" $full)) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := .settings -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $found $name -}}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) -}}
{{- $_ := set $found $name ($value | int64 | toString) -}}
{{- else -}}
{{- $_ := set $found $name (toString $value) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* The name of a ConfigMap with the hash of its content: changed settings restart the pods that use it, and no others. A
name that is not among `configured` stays. `name`, `configured`. */}}
{{- define "inflight.hashed" -}}
{{- if hasKey .configured .name -}}
{{- printf "%s-%s" .name (get .configured .name | toJson | sha256sum | trunc 10) -}}
{{- else -}}
{{- .name -}}
{{- end -}}
{{- end -}}

{{/* A ConfigMap of settings. `root`, `name` (without the hash), `settings`. */}}
{{- define "inflight.configMap" }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "inflight.hashed" (dict "name" .name "configured" (dict .name .settings)) }}
  labels:
    {{- include "inflight.labels" .root | nindent 4 }}
data:
  {{- toYaml .settings | nindent 2 }}
{{ end -}}
