# A CPU image: make wheels && docker build -t ktconv .
#
#   docker run --rm -v ~/.cache/huggingface:/models -v "$PWD":/data ktconv \
#     quantize-cpu Qwen/Qwen3-30B-A3B /data/out --method int4
FROM python:3.13-slim

COPY constraints.txt dist/*.whl /tmp/wheels/
RUN python -m pip install --no-cache-dir --only-binary=:all: -c /tmp/wheels/constraints.txt \
      --find-links /tmp/wheels "ktconv[hub]" \
    && rm -r /tmp/wheels

# The Hugging Face cache, so that models are neither downloaded again nor kept in the image.
ENV HF_HOME=/models
VOLUME /models
WORKDIR /data
ENTRYPOINT ["ktconv"]
CMD ["--help"]
