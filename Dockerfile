# One image for each process: docker build --target operator|extender|agent .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
# The commit that `carpool --version` names, such as $(git rev-parse --short=12 HEAD): the context has no repository.
ARG CARPOOL_COMMIT
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM wheel AS operator-environment
# `trace` brings PyTorch, for spec.model.catalog and spec.model.graph; `operator` alone makes a small image that abstains from those.
# With PIP_EXTRA_INDEX_URL pip finds builds of PyTorch without CUDA, which is all that tracing needs.
ARG EXTRAS=operator,trace
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv --without-pip /opt/carpool \
  && pip --python /opt/carpool install --no-cache-dir -c constraints.txt "$(ls /wheels/carpool-*.whl)[${EXTRAS}]"

FROM wheel AS extender-environment
RUN python -m venv --without-pip /opt/carpool \
  && pip --python /opt/carpool install --no-cache-dir -c constraints.txt "$(ls /wheels/carpool-*.whl)[extender]"

FROM wheel AS agent-environment
RUN python -m venv --without-pip /opt/carpool \
  && pip --python /opt/carpool install --no-cache-dir -c constraints.txt "$(ls /wheels/carpool-*.whl)[agent]"

FROM python:${PYTHON}-slim AS process
LABEL org.opencontainers.image.title="carpool" \
      org.opencontainers.image.licenses="Apache-2.0"
# The root file system is read-only; libraries that want a home write to the volume on /tmp.
ENV PATH=/opt/carpool/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT ["carpool"]

FROM process AS operator
COPY --from=operator-environment /opt/carpool /opt/carpool
CMD ["operator"]

FROM process AS extender
COPY --from=extender-environment /opt/carpool /opt/carpool
CMD ["extender"]

# The chart runs it as root: the kubelet's sockets belong to root.
FROM process AS agent
COPY --from=agent-environment /opt/carpool /opt/carpool
CMD ["agent"]
