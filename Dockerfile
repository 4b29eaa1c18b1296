# One image for every service; docker-compose.yml says which module each container runs.
#
#   docker build -t slackwater:local .                                    CPU
#   docker build -t slackwater:gpu --build-arg TORCH=cuda .               CUDA (several GB)
#
# The CPU image wants the CPU build of torch, which is not on pip's default index: name an index
# that has it with --build-arg PIP_EXTRA_INDEX_URL=…. Without one the build stops at the CUDA
# guard of constraints.txt instead of downloading gigabytes.

# -- what to install, apart from the rest of pyproject.toml, so that a changed linter setting
#    does not install everything anew
FROM python:3.11-slim-bookworm AS wanted
WORKDIR /wanted
COPY pyproject.toml constraints.txt ./
ARG TORCH=cpu
RUN case "$TORCH" in cpu) ;; \
      cuda) sed -i '/^# CUDA guard/,$d' constraints.txt ;; \
      *) echo "TORCH is cpu or cuda, not '$TORCH'" >&2; exit 1 ;; \
    esac \
 && python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['models'], \
*p['optional-dependencies']['gateway'], *p['optional-dependencies']['celery'], \
*p['optional-dependencies']['otel'], sep='\n')" > requirements.txt \
 && rm pyproject.toml

# -- an environment with the dependencies and without pip
FROM python:3.11-slim-bookworm AS dependencies
# In this stage only: an index may carry a password, and the image that is shipped has no trace.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY --from=wanted /wanted /wanted
# Last, torch's own tests and what only a compiler needs go: 190 MB.
RUN python -m venv --without-pip /opt/venv \
 && python -m pip --python /opt/venv/bin/python install --no-cache-dir --only-binary :all: \
      --constraint /wanted/constraints.txt --requirement /wanted/requirements.txt \
 && cd /opt/venv/lib/python3.11/site-packages/torch \
 && rm -rf test include share/cmake bin/protoc* bin/test_* bin/*_test

# -- our own files; read-only for the service, whatever umask they were checked out with
FROM python:3.11-slim-bookworm AS files
WORKDIR /app
COPY models/tiny-qwen-image models/tiny-qwen-image
RUN chmod -R u=rwX,go=rX models
COPY slackwater code/slackwater
COPY common code/common
COPY services code/services
COPY encoder_svc code/encoder_svc
COPY denoise_svc code/denoise_svc
COPY decoder_svc code/decoder_svc
# Compiled here, since the service may not write.
RUN chmod -R u=rwX,go=rX code \
 && python -m compileall -q -s code -p /app --invalidation-mode checked-hash code

# -- what runs
FROM python:3.11-slim-bookworm
# /arena belongs to the user so that a fresh volume mounted there does too.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin slackwater \
 && install -d -o slackwater -g slackwater -m 0700 /arena
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1 \
    OMP_WAIT_POLICY=PASSIVE \
    HF_HUB_OFFLINE=1 \
    SLACKWATER_ARENA_PATH=/arena/arena
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=files /app/models /app/models
COPY --from=files /app/code /app
WORKDIR /app
USER slackwater
# Run it under an init (`docker run --init`, `init: true`): as process 1, Python ignores a
# SIGTERM that comes before the service has installed its handler, while a model loads.
STOPSIGNAL SIGTERM
CMD ["python", "-m", "services.coordinator"]
