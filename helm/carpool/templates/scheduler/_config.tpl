{{- define "carpool.schedulerConfig" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  # Placement goes on within 20 seconds after the leader's node was lost; the default of 15 leaves no time to place.
  leaseDuration: 12s
  renewDeadline: 8s
  resourceNamespace: {{ include "carpool.namespace" . }}
  resourceName: {{ include "carpool.fullname" . }}-scheduler
# Otherwise the extender sees only a part of the nodes of a cluster with more than a hundred.
percentageOfNodesToScore: 100
# A GPU that became free is not left idle while a pod sits out a longer penalty.
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 2
profiles:
  - schedulerName: carpool-scheduler
extenders:
  - urlPrefix: https://127.0.0.1:8888
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    preemptVerb: preempt
    # One point of the extender outweighs all of the scheduler's own plugins together, which only break ties.
    weight: 1000
    nodeCacheCapable: true
    # Longer than the longest bind: after a timeout the scheduler would bind elsewhere while the first bind continues.
    httpTimeout: {{ add .Values.settings.bindTimeoutSeconds 10 }}s
    ignorable: false
    managedResources:
      - name: carpool.dev/gpu
        ignoredByScheduler: false
    enableHTTPS: true
    # Without caFile the scheduler would silently verify nothing.
    # The scheduler reads certificate and key for each connection, the authority once.
    tlsConfig:
      {{- if .Values.scheduler.tls.existingSecret }}
      certFile: /etc/carpool/tls/tls.crt
      keyFile: /etc/carpool/tls/tls.key
      {{- else }}
      certFile: /etc/carpool/tls/client.pem
      keyFile: /etc/carpool/tls/client.pem
      {{- end }}
      caFile: /etc/carpool/tls/ca.crt
{{- end -}}
