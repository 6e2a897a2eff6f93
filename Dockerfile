# One image for each process: docker build --target operator|extender|agent .   `make image` builds them without Docker.
# Python 3.11 or later, the same in both, and openssl 3; the first has pip, a shell, find and rm as well.
ARG BUILD_IMAGE=python:3.11-slim
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${BUILD_IMAGE} AS carpool
WORKDIR /source
COPY . .
# The commit that `carpool --version` names, such as $(git rev-parse --short=12 HEAD): the context has no repository.
ARG CARPOOL_COMMIT
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
  && python -m venv --without-pip /opt/carpool \
  && pip --python /opt/carpool install --no-cache-dir --no-deps /wheels/*.whl

# A wheel that has requirements and no code, so that the layers of requirements stay while only code changes.
FROM ${BUILD_IMAGE} AS requirements
WORKDIR /source
COPY pyproject.toml build_hook.py constraints.txt ./
RUN touch README.md LICENSE \
  && pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
  && python -m venv --without-pip /opt/carpool

FROM requirements AS operator-requirements
# `operator,trace` brings PyTorch, for models of spec.model.catalog that Carpool has not stored. PIP_EXTRA_INDEX_URL may name an
# index of its builds without CUDA, which is all that tracing needs.
ARG OPERATOR_EXTRAS=operator
ARG PIP_EXTRA_INDEX_URL
RUN pip --python /opt/carpool install --no-cache-dir -c constraints.txt "$(echo /wheels/carpool-*.whl)[${OPERATOR_EXTRAS}]" \
  && if ls -d /opt/carpool/lib/*/site-packages/nvidia; then \
    echo "expected PyTorch's build without CUDA, found 5 GB of CUDA: set PIP_EXTRA_INDEX_URL to an index that has it"; exit 1; fi \
  && find /opt/carpool -type d -name tests -prune -exec rm -r {} +

# The board runs on it, too.
FROM requirements AS extender-requirements
RUN pip --python /opt/carpool install --no-cache-dir -c constraints.txt "$(echo /wheels/carpool-*.whl)[extender,board]" \
  && find /opt/carpool -type d -name tests -prune -exec rm -r {} +

FROM requirements AS agent-requirements
RUN pip --python /opt/carpool install --no-cache-dir -c constraints.txt "$(echo /wheels/carpool-*.whl)[agent]" \
  && find /opt/carpool -type d -name tests -prune -exec rm -r {} +

FROM ${PYTHON_IMAGE} AS process
LABEL org.opencontainers.image.title="carpool" \
      org.opencontainers.image.licenses="Apache-2.0"
# Neither base has bytecode of the standard library, which halves the time of a start.
RUN ["python", "-c", "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('stdlib'), quiet=1)"]
# The root file system is read-only; libraries that want a home write to the volume on /tmp.
ENV PATH=/opt/carpool/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT ["carpool"]

FROM process AS operator
COPY --from=operator-requirements /opt/carpool /opt/carpool
COPY --from=carpool /opt/carpool /opt/carpool
CMD ["operator"]

FROM process AS extender
COPY --from=extender-requirements /opt/carpool /opt/carpool
COPY --from=carpool /opt/carpool /opt/carpool
CMD ["extender"]

# The chart runs it as root: the kubelet's sockets belong to root.
FROM process AS agent
COPY --from=agent-requirements /opt/carpool /opt/carpool
COPY --from=carpool /opt/carpool /opt/carpool
CMD ["agent"]
