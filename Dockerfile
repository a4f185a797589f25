# turnstile in a container:
#   docker build --build-arg VERSION="$(sh script/version)" -t turnstile .
#   docker run -p 11434:11434 -p 8188:8188 -e OLLAMA_URL=http://... -e COMFY_URL=http://... turnstile
# docs/compose.yaml has it among engines and Open WebUI.

FROM python:3.11-slim-bookworm AS build
ARG VERSION=0.1.dev0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 SETUPTOOLS_SCM_PRETEND_VERSION=$VERSION
WORKDIR /src
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY turnstile turnstile
COPY twisted twisted
RUN python -m venv /opt/turnstile \
    && /opt/turnstile/bin/pip install . \
    && /opt/turnstile/bin/pip uninstall --yes pip \
    # Twisted's list of plugins, which a user without rights can't write.
    && /opt/turnstile/bin/turnstile --version

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="turnstile" \
    org.opencontainers.image.description="Lets several GPU engines share one card, one at a time" \
    org.opencontainers.image.licenses="MIT"
COPY --from=build /opt/turnstile /opt/turnstile
ENV PATH=/opt/turnstile/bin:$PATH PYTHONUNBUFFERED=1
# A number, so that Kubernetes can tell that it is not root.
USER 65532:65532
EXPOSE 8188 11434
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["python", "-m", "turnstile.healthcheck"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["turnstile"]
