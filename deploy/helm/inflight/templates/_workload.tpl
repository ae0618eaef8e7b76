{{/* The reference of an image: registry of our own images, repository, and digest or tag. `root`, `image`. */}}
{{- define "inflight.image" -}}
{{- $registry := .root.Values.image.registry -}}
{{- $name := .image.repository -}}
{{- if and $registry (hasPrefix "inflight/" $name) }}{{ $name = printf "%s/%s" $registry $name }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/*
Changes a workload of the sources as its values say, and returns it as JSON. `root`, `object`, `values` (of the component,
laid over `defaults` here), `image`, `kind` (of its PriorityClass; empty: none), `configured` (the content of ConfigMaps by
their names in the sources: the pods use them by the names that have its hash), `scaled` (another object sets the number of
replicas), `foreign` (not a process of inflight: of `defaults`, only what says where and as whom pods run).
*/}}
{{- define "inflight.workload" -}}
{{- $defaults := .root.Values.defaults -}}
{{- if .foreign -}}
{{- $defaults = pick $defaults "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "runtimeClassName" "schedulerName" "priorityClassName" "podSecurityContext" "serviceAccountName" "dnsConfig" -}}
{{- end -}}
{{- $values := mergeOverwrite (deepCopy $defaults) (deepCopy .values) -}}
{{- $object := .object -}}
{{- $template := $object.spec.template -}}
{{- $pod := $template.spec -}}
{{- $container := first $pod.containers -}}
{{- if .scaled -}}
{{- $_ := unset $object.spec "replicas" -}}
{{- else if hasKey $values "replicas" -}}
{{- $_ := set $object.spec "replicas" (int $values.replicas) -}}
{{- end -}}
{{- $configured := .configured | default dict -}}
{{- range $source := $container.envFrom -}}
{{- with $source.configMapRef }}{{ $_ := set . "name" (include "inflight.hashed" (dict "name" .name "configured" $configured)) }}{{ end -}}
{{- end -}}
{{- range $volume := $pod.volumes -}}
{{- with $volume.configMap }}{{ $_ := set . "name" (include "inflight.hashed" (dict "name" .name "configured" $configured)) }}{{ end -}}
{{- end -}}
{{- with $values.podAnnotations }}{{ $_ := set $template.metadata "annotations" . }}{{ end -}}
{{- with $values.podLabels -}}
{{- $_ := set $template.metadata "labels" (merge $template.metadata.labels (deepCopy .)) -}}
{{- end -}}
{{- if $values.priorityClassName -}}
{{- $_ := set $pod "priorityClassName" $values.priorityClassName -}}
{{- else if and .kind .root.Values.priorityClasses.create -}}
{{- $_ := set $pod "priorityClassName" (include "inflight.priorityClass" .) -}}
{{- else -}}
{{- $_ := unset $pod "priorityClassName" -}}
{{- end -}}
{{- range $name := list "nodeSelector" "affinity" "topologySpreadConstraints" "runtimeClassName" "schedulerName" "serviceAccountName" "dnsConfig" -}}
{{- with get $values $name }}{{ $_ := set $pod $name . }}{{ end -}}
{{- end -}}
{{- with $values.tolerations }}{{ $_ := set $pod "tolerations" (concat ($pod.tolerations | default list) .) }}{{ end -}}
{{- if not (kindIs "invalid" $values.minReadySeconds) }}{{ $_ := set $object.spec "minReadySeconds" (int $values.minReadySeconds) }}{{ end -}}
{{- with $values.strategy }}{{ $_ := set $object.spec (ternary "strategy" "updateStrategy" (eq $object.kind "Deployment")) . }}{{ end -}}
{{- range $name := list "startupProbe" "readinessProbe" "livenessProbe" -}}
{{- with get $values $name }}{{ $_ := set $container $name (mergeOverwrite (get $container $name | default dict) (deepCopy .)) }}{{ end -}}
{{- end -}}
{{- with $values.podSecurityContext -}}
{{- $_ := set $pod "securityContext" (mergeOverwrite $pod.securityContext (deepCopy .)) -}}
{{- end -}}
{{- with .root.Values.image.pullSecrets -}}
{{- $names := list }}{{ range . }}{{ $names = append $names (dict "name" .) }}{{ end -}}
{{- $_ := set $pod "imagePullSecrets" $names -}}
{{- end -}}
{{- with $values.settings -}}
{{- with get . "INFLIGHT_DRAIN_TIMEOUT_S" -}}
{{- /* preStop sleeps for 10 s; 20 s remain to stop. */ -}}
{{- $_ := set $pod "terminationGracePeriodSeconds" (add (int .) 30) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $container "image" (include "inflight.image" .) -}}
{{- with .root.Values.image.pullPolicy }}{{ $_ := set $container "imagePullPolicy" . }}{{ end -}}
{{- with $values.resources -}}
{{- $_ := set $container "resources" (mergeOverwrite $container.resources (deepCopy .)) -}}
{{- end -}}
{{- /* A variable of the container hides one of its ConfigMaps, and a server-side apply refuses it twice. */ -}}
{{- range $variable := $container.env | default list -}}
{{- $refusal := printf "%s: the chart sets this variable of %s itself, from other values" $variable.name $container.name -}}
{{- if hasKey ($values.settings | default dict) $variable.name }}{{ fail (printf "settings.%s" $refusal) }}{{ end -}}
{{- range $values.extraEnv }}{{ if eq .name $variable.name }}{{ fail (printf "extraEnv: %s" $refusal) }}{{ end }}{{ end -}}
{{- end -}}
{{- range $from, $to := dict "extraEnv" "env" "extraEnvFrom" "envFrom" "extraVolumeMounts" "volumeMounts" -}}
{{- with get $values $from }}{{ $_ := set $container $to (concat (get $container $to | default list) .) }}{{ end -}}
{{- end -}}
{{- with $values.extraVolumes }}{{ $_ := set $pod "volumes" (concat $pod.volumes .) }}{{ end -}}
{{- with $values.extraContainers }}{{ $_ := set $pod "containers" (concat $pod.containers .) }}{{ end -}}
{{- with $values.extraInitContainers }}{{ $_ := set $pod "initContainers" (concat ($pod.initContainers | default list) .) }}{{ end -}}
{{- toJson $object -}}
{{- end -}}

{{/* Where a router or executor finds its model: changes the pod's volume `models`. `root`, `pod`. */}}
{{- define "inflight.models" -}}
{{- $models := .root.Values.models -}}
{{- $volumes := list -}}
{{- range $volume := .pod.volumes -}}
{{- if eq $volume.name "models" -}}
{{- if eq $models.source "claim" -}}
{{- $claim := $models.claim.existing | default (printf "%s-models" (include "inflight.fullname" $.root)) -}}
{{- $volume = dict "name" "models" "persistentVolumeClaim" (dict "claimName" $claim "readOnly" true) -}}
{{- else if eq $models.source "image" -}}
{{- $volume = dict "name" "models" "image" (dict "reference" (include "inflight.image" (dict "root" $.root "image" $models.image)) "pullPolicy" "IfNotPresent") -}}
{{- else if eq $models.source "copy" -}}
{{- $volume = dict "name" "models" "emptyDir" dict -}}
{{- else -}}
{{- $volume = mergeOverwrite (dict "name" "models") (deepCopy $models.volume) -}}
{{- end -}}
{{- end -}}
{{- $volumes = append $volumes $volume -}}
{{- end -}}
{{- $_ := set .pod "volumes" $volumes -}}
{{- if eq $models.source "image" -}}
{{- range $mount := (first .pod.containers).volumeMounts -}}
{{- if eq $mount.name "models" }}{{ $_ := set $mount "subPath" "models" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if eq $models.source "copy" -}}
{{- $copy := dict "name" "models" "image" (include "inflight.image" (dict "root" .root "image" $models.image)) "command" (list "cp" "-r" "/models/." "/copied") -}}
{{- with .root.Values.image.pullPolicy }}{{ $_ := set $copy "imagePullPolicy" . }}{{ end -}}
{{- $_ := set $copy "resources" (dict "requests" (dict "cpu" "100m" "memory" "64Mi") "limits" (dict "memory" "256Mi")) -}}
{{- $_ := set $copy "securityContext" (first .pod.containers).securityContext -}}
{{- $_ := set $copy "volumeMounts" (list (dict "name" "models" "mountPath" "/copied")) -}}
{{- $_ := set .pod "initContainers" (list $copy) -}}
{{- end -}}
{{- end -}}

{{/* Every pool by name, its values laid over those of `executor`. JSON. */}}
{{- define "inflight.pools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.pools -}}
{{- if not (kindIs "invalid" $pool) -}}
{{- $_ := set $pools $name (mergeOverwrite (deepCopy $.Values.executor) (deepCopy $pool)) -}}
{{- end -}}
{{- end -}}
{{- if not $pools }}{{ fail "pools: name at least one" }}{{ end -}}
{{- toJson $pools -}}
{{- end -}}

{{/* The suffix of a pool's objects: none for `main`. */}}
{{- define "inflight.suffix" -}}
{{- if ne . "main" }}-{{ . }}{{ end -}}
{{- end -}}

{{/* The name by which clients ask for a pool's model. */}}
{{- define "inflight.servedName" -}}
{{- .servedModelName | default (base .model) -}}
{{- end -}}
