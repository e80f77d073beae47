# One image, four commands: kvasir-node, kvasir-backbone, kvasir-market, kvasir-relay. Not root.
#
#     docker build -t kvasir .
#     docker run -p 8420:8420 -v kvasir:/state kvasir kvasir-backbone up --state-dir /state --host 0.0.0.0
FROM python:3.11-slim

# The compiler builds the expert kernels at first use; without one, experts run on torch, several times slower.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 kvasir \
    && install -d -o kvasir -g kvasir /state
WORKDIR /app

# torch first, from its pin, so that this large layer changes only with the pin. On x86-64 the default index
# has the CUDA build: name an index of CPU builds with --build-arg PIP_EXTRA_INDEX_URL=... for a small image.
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt ./
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE ./
COPY relay relay
COPY market market
COPY kvasir_node kvasir_node
COPY kvasir_backbone kvasir_backbone
RUN pip install --no-cache-dir -c constraints.txt ".[backbone,postgres]"

USER kvasir
VOLUME /state
EXPOSE 8420
CMD ["kvasir-backbone", "--help"]
