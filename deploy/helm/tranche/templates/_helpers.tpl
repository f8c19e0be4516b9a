{{/* The image that holds every part that runs in the cluster. */}}
{{- define "tranche.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The node plugin's ServiceAccount. The admission policy names the same one. */}}
{{- define "tranche.nodePlugin.name" -}}
{{ .Release.Name }}-node-plugin
{{- end }}

{{- define "tranche.controller.name" -}}
{{ .Release.Name }}-controller
{{- end }}

{{- define "tranche.usageApi.name" -}}
{{ .Release.Name }}-usage-api
{{- end }}

{{- define "tranche.mps.name" -}}
{{ .Release.Name }}-mps
{{- end }}

{{/* The user that the API server sees when the node plugin writes. */}}
{{- define "tranche.nodePlugin.user" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "tranche.nodePlugin.name" . }}
{{- end }}

{{/* Call with (dict "root" $ "component" "…"). */}}
{{- define "tranche.labels" -}}
{{ include "tranche.selectorLabels" . }}
app.kubernetes.io/part-of: tranche
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tranche.selectorLabels" -}}
app.kubernetes.io/name: tranche
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* CEL: the opaque configurations of a claim, a claim template or a device class. */}}
{{- define "tranche.cel.configs" -}}
(request.resource.resource == "deviceclasses" ? object.spec.?config.orValue([])
: request.resource.resource == "resourceclaimtemplates" ? object.spec.spec.?devices.?config.orValue([])
: object.spec.?devices.?config.orValue([]))
.filter(c, c.?opaque.?driver.orValue("") == "gpu.tranche.dev")
{{- end }}

{{/* CEL: whether a request, or an alternative of one, is for our devices: by its class's name, by a class that selects our driver, or
by its own selectors. Call with the name of its variable. */}}
{{- define "tranche.cel.isOurs" -}}
({{ . }}.deviceClassName.endsWith(".gpu.tranche.dev") ||
variables.isOurClass && {{ . }}.deviceClassName == params.metadata.name ||
{{ . }}.?selectors.orValue([]).exists(e, e.?cel.?expression.orValue("").contains("gpu.tranche.dev")))
{{- end }}

{{/* CEL: what the requests for our devices, first choices or alternatives, ask of one capacity. */}}
{{- define "tranche.cel.amounts" -}}
(variables.requests.filter(r, has(r.exactly) && {{ include "tranche.cel.isOurs" "r.exactly" }})
.map(r, r.exactly.?capacity.?requests[?{{ . | quote }}]) +
variables.requests.map(r, r.?firstAvailable.orValue([])
.filter(s, {{ include "tranche.cel.isOurs" "s" }}).map(s, s.?capacity.?requests[?{{ . | quote }}])).flatten())
.filter(o, o.hasValue()).map(o, string(o.value()))
{{- end }}
