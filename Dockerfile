# hybrid-kv on a CPU: docker build -t hybrid-kv . && docker run --rm hybrid-kv guard --quick
FROM python:3.13-slim-bookworm
ENV PIP_NO_CACHE_DIR=1 OMP_NUM_THREADS=1
COPY . /hybrid-kv
WORKDIR /hybrid-kv
# As `make guard` installs it: torch in its build for CPUs, all versions as pinned.
RUN python -m venv /opt/hybrid-kv \
    && bash .ci/install /opt/hybrid-kv/bin/python \
    && useradd --create-home --uid 1000 guard
ENV PATH=/opt/hybrid-kv/bin:$PATH
USER 1000
WORKDIR /home/guard
ENTRYPOINT ["hybrid-kv"]
CMD ["--help"]
