{{- define "carpool.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "carpool.fullname" -}}
{{- $name := include "carpool.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "carpool.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace -}}
{{- end -}}

{{/* Labels by which workloads find their pods. Argument: (list $ COMPONENT). */}}
{{- define "carpool.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "carpool.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of every object. Argument: (list $ COMPONENT). */}}
{{- define "carpool.labels" -}}
{{- $root := index . 0 -}}
{{ include "carpool.selector" . }}
app.kubernetes.io/part-of: carpool
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* `metadata` of a namespaced object. Argument: (list $ COMPONENT). */}}
{{- define "carpool.metadata" -}}
{{ include "carpool.clusterMetadata" . }}
namespace: {{ include "carpool.namespace" (index . 0) }}
{{- end -}}

{{/* `metadata` of a cluster-scoped object. Argument: (list $ COMPONENT). */}}
{{- define "carpool.clusterMetadata" -}}
name: {{ include "carpool.fullname" (index . 0) }}-{{ index . 1 }}
labels:
  {{- include "carpool.labels" . | nindent 2 }}
{{- end -}}

{{/* Reference of an image. Argument: (list $ IMAGE DEFAULT-TAG KEY-IN-VALUES WHERE-TO-GET-IT). */}}
{{- define "carpool.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := $image.registry | default $root.Values.global.imageRegistry -}}
{{- if not $registry -}}
{{- fail (printf "\n\nexpected the registry of image %s in %s.registry or global.imageRegistry, found neither.\n%s\n" $image.repository (index . 3) (index . 4)) -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s/%s@%s" $registry $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s/%s:%s" $registry $image.repository ($image.tag | default (index . 2)) -}}
{{- end -}}
{{- end -}}

{{/* Image of one of Carpool's own processes. Argument: (list $ IMAGE KEY-IN-VALUES). */}}
{{- define "carpool.ownImage" -}}
{{- $root := index . 0 -}}
{{- include "carpool.image" (list $root (index . 1) $root.Chart.AppVersion (index . 2) "Carpool's images are built from its Dockerfile: push them to a registry that your nodes can pull from and name it, for example --set global.imageRegistry=registry.example.org/team; for images loaded into the nodes by hand, tag them localhost/... and use --set global.imageRegistry=localhost.") -}}
{{- end -}}

{{/* Release of Kubernetes that the cluster runs, without what a vendor appended: v1.31.2. */}}
{{- define "carpool.kubernetesRelease" -}}
{{- regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version -}}
{{- end -}}

{{/* Environment that every one of Carpool's processes has. */}}
{{- define "carpool.commonEnv" -}}
- name: CARPOOL_METRICS_PORT
  value: "9400"
- name: CARPOOL_LOG_LEVEL
  value: {{ .Values.settings.log.level }}
- name: CARPOOL_LOG_FORMAT
  value: {{ .Values.settings.log.format }}
- name: CARPOOL_AUTOSCALING
  value: {{ .Values.settings.autoscaling | quote }}
{{- end -}}

{{/* Port and probes that every one of Carpool's processes has. */}}
{{- define "carpool.health" -}}
ports:
  - {name: metrics, containerPort: 9400}
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  initialDelaySeconds: 10
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
{{- end -}}

{{/* Pod security of the processes that touch nothing on their node. */}}
{{- define "carpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "carpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* `metadata` of a workload's pods. Argument: (list $ COMPONENT VALUES ANNOTATIONS). */}}
{{- define "carpool.podMetadata" -}}
{{- $values := index . 2 -}}
labels:
  {{- merge (include "carpool.labels" . | fromYaml) ($values.podLabels | default dict) | toYaml | nindent 2 }}
{{- with merge (index . 3) ($values.podAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* ServiceAccount of a workload. Argument: (list $ COMPONENT VALUES). */}}
{{- define "carpool.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "carpool.metadata" . | nindent 2 }}
  {{- with (index . 2).serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Where the pods of a Deployment may run: its replicas on different nodes, if there are as many. Argument: (list $ COMPONENT VALUES). */}}
{{- define "carpool.spread" -}}
{{- $values := index . 2 -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "carpool.selector" . | fromYaml)) -}}
{{- $apart := dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) -}}
{{- include "carpool.placement" (merge (dict "affinity" ($values.affinity | default (dict "podAntiAffinity" $apart))) $values) -}}
{{- end -}}

{{/* Where a workload's pods may run. Argument: the component's values. */}}
{{- define "carpool.placement" -}}
priorityClassName: {{ .priorityClassName }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Settings by which the extender decides, as environment variables. The ConfigMap shows them to `carpool explain` and `what-if`.
     `toJson` because Helm prints a million of a values file as 1e+06. */}}
{{- define "carpool.decisions" -}}
{{- with .Values.settings -}}
CARPOOL_POLICY: {{ .policy | quote }}
CARPOOL_QUEUE_ORDER: {{ .queueOrder | quote }}
CARPOOL_DEFAULT_DURATION_SECONDS: {{ .defaultDurationSeconds | toJson | quote }}
CARPOOL_JOB_POLICIES: {{ .jobPolicies | quote }}
CARPOOL_COUNT_PEAKS: {{ .countPeaks | quote }}
CARPOOL_TENANCY_GROUPS: {{ include "carpool.tenancyGroups" $ | quote }}
CARPOOL_SLOTS_PER_GPU: {{ .slotsPerGpu | quote }}
CARPOOL_SLOWDOWN_QUANTILE: {{ .slowdownQuantile | quote }}
{{- $limits := .preconditions }}
{{- range $key, $name := dict "mostSmActive" "CARPOOL_MOST_SM_ACTIVE" "mostJointSmActive" "CARPOOL_MOST_JOINT_SM_ACTIVE" "leastFreeMib" "CARPOOL_LEAST_FREE_MIB" "mostJobs" "CARPOOL_MOST_JOBS" }}
{{- $value := index $limits $key }}
{{- if not (kindIs "invalid" $value) }}
{{ $name }}: {{ $value | toJson | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The tenancy groups as GROUP=NAMESPACE,NAMESPACE;GROUP=*. */ -}}
{{- define "carpool.tenancyGroups" -}}
{{- $groups := list -}}
{{- range $group, $namespaces := .Values.settings.tenancyGroups -}}
{{- $groups = append $groups (printf "%s=%s" $group (join "," $namespaces)) -}}
{{- end -}}
{{- join ";" $groups -}}
{{- end -}}
