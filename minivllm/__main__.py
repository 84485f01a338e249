"""`python -m minivllm`."""

from minivllm.cli import main

if __name__ == "__main__":
    main()
