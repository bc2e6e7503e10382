{{- define "darts.name" -}}
{{- printf "%s-%s" .root.Release.Name .model.name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "darts.selector" -}}
app.kubernetes.io/name: darts-server
app.kubernetes.io/instance: {{ .root.Release.Name }}
darts-server/model: {{ .model.name }}
{{- end -}}

{{- define "darts.common" -}}
app.kubernetes.io/name: darts-server
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.servingEngineSpec.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "darts.labels" -}}
{{ include "darts.common" .root }}
darts-server/model: {{ .model.name }}
{{- end -}}

{{- define "darts.image" -}}
{{- $tag := printf "%s%s" .root.Chart.AppVersion (ternary "-ray" "" (hasKey .model "replicas")) -}}
{{- printf "%s:%s" .root.Values.servingEngineSpec.repository (.root.Values.servingEngineSpec.tag | default $tag) -}}
{{- end -}}

{{- define "darts.gpus" -}}
{{- mul .model.requestGPU (.model.replicas | default 1) -}}
{{- end -}}

{{- define "darts.secret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-keys" .Release.Name) -}}
{{- end -}}

{{- define "darts.args" -}}
{{- $vllm := .model.vllmConfig | default dict -}}
{{- $darts := .model.dartsConfig | default dict -}}
- {{ .model.modelURL | quote }}
- --host=0.0.0.0
- --port=8000
- --shutdown-timeout={{ .root.Values.servingEngineSpec.shutdownTimeout }}
{{- range $flag, $value := dict "replicas" .model.replicas "max-model-len" $vllm.maxModelLen "tensor-parallel-size" $vllm.tensorParallelSize "data-parallel-size" $vllm.dataParallelSize "gpu-memory-utilization" $vllm.gpuMemoryUtilization "dtype" $vllm.dtype "policy" $darts.policy "redundancy" $darts.redundancy "group-size" $darts.groupSize }}
{{- if $value }}
- --{{ $flag }}={{ $value }}
{{- end }}
{{- end }}
{{- range concat ($vllm.extraArgs | default list) ($darts.extraArgs | default list) }}
- {{ . | quote }}
{{- end }}
{{- end -}}
