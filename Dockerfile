# FlowFabric: the server, the worker and the command line in one image. The command decides which it is:
#
#   docker build -t flowfabric .
#   docker run -e FLOWFABRIC_URL=postgresql://… -e FF_API_TOKEN=… -p 9090:9090 flowfabric serve --host 0.0.0.0
#
# An application adds its own code:
#
#   FROM flowfabric
#   COPY shop /app/shop
#   CMD ["worker", "shop.tasks:app"]

FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --prefix=/install ".[postgres,server,client]"

FROM python:3.12-slim
COPY --from=build /install /usr/local
RUN useradd --create-home --uid 10001 flowfabric && mkdir /app && chown flowfabric /app
WORKDIR /app
USER flowfabric
ENV PYTHONUNBUFFERED=1 PYTHONPATH=/app
EXPOSE 9090
STOPSIGNAL SIGTERM
ENTRYPOINT ["ff"]
CMD ["--help"]
