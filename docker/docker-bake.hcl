# SPDX-License-Identifier: Apache-2.0
# docker buildx bake --file docker/docker-bake.hcl engine-cpu engine-cuda kernels-cuda
# docker/build.sh sets the variables and fills build/wheels first.

variable "BASE" { default = "vllm-qualify-base:bookworm" }
variable "BASE_DIGEST" { default = "unknown" }
variable "SOURCE" { default = "unknown" }
variable "REVISION" { default = "unknown" }
variable "LOCK_SHA256" { default = "unknown" }
variable "TAG" { default = "" }
variable "SOURCE_DATE_EPOCH" { default = "315532800" }

group "default" {
  targets = ["engine-cpu"]
}

target "engine" {
  context    = "."
  dockerfile = "docker/Dockerfile"
  args = {
    BASE              = BASE
    BASE_NAME         = BASE
    BASE_DIGEST       = BASE_DIGEST
    SOURCE            = SOURCE
    REVISION          = REVISION
    LOCK_SHA256       = LOCK_SHA256
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
  network   = "host"
  platforms = ["linux/amd64"]
  # Both are manifests beside the image's own: its platform manifest, the subject of a receipt, stays as it is.
  attest = ["type=provenance,mode=max", "type=sbom"]
}

target "engine-cpu" {
  inherits = ["engine"]
  target   = "engine-cpu"
  tags     = [TAG != "" ? TAG : "vllm-qualify-engine:cpu"]
}

target "engine-cuda" {
  inherits = ["engine"]
  target   = "engine-cuda"
  tags     = [TAG != "" ? TAG : "vllm-qualify-engine:cuda"]
}

target "kernels-cuda" {
  inherits = ["engine"]
  target   = "kernels-cuda"
  tags     = [TAG != "" ? TAG : "vllm-qualify-engine:kernels"]
}
