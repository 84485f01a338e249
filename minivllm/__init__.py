"""minivllm: an LLM inference engine small enough to read in a weekend, complete enough to serve a real model."""

import os

__version__ = "0.1.0"

if os.environ.get("MINIVLLM_WITH"):  # a parent process runs a student's functions inside the engine: so does its child
    from minivllm.course.splice import install_from_environment

    install_from_environment()
