"""Regenerates the protobuf modules: ``python -m elastic_train.coordinator.generate`` (needs the ``dev`` extra).

Run it with the oldest grpcio-tools that `pyproject.toml` allows: generated code works with its own and newer
versions of protobuf, not with older ones.
"""

from pathlib import Path


def main() -> None:
    from grpc_tools import protoc

    root = Path(__file__).resolve().parents[2]
    proto = "elastic_train/coordinator/control.proto"
    arguments = [
        "protoc",
        f"-I{root}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        f"--grpc_python_out={root}",
        proto,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"protoc failed on {proto}")


if __name__ == "__main__":
    main()
