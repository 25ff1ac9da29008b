#!/usr/bin/env python3
"""Checks that the objects for Kubeflow Trainer v2 in docs/clusters.md are valid.

    pip install kubeflow-trainer-api==2.3.0 pyyaml
    python3 scripts/check_kubeflow.py

The package on PyPI is generated from the trainer's API. A field that it does not know is an error, as is a missing one. With
`--crds FOLDER`, such as manifests/base/crds of https://github.com/kubeflow/trainer, and `pip install jsonschema`, the schemas of the
cluster's own definitions are checked as well.
"""

import argparse
import re
import sys
from pathlib import Path

import kubeflow_trainer_api.models as models
import yaml

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"ClusterTrainingRuntime", "TrainJob"}


def differences(given, known, path=""):
    """The paths at which what the model has read differs from the text: fields that it does not know."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [text for name, value in given.items() for text in differences(value, known.get(name), f"{path}.{name}")]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        return [text for at, pair in enumerate(zip(given, known)) for text in differences(*pair, f"{path}[{at}]")]
    return [] if given == known else [f"{path}: {given!r} is not known"]


def strict(schema):
    """As a cluster with `--validate=strict`: fields that the schema does not name are errors."""
    if isinstance(schema, dict):
        schema = {name: strict(value) for name, value in schema.items() if name != "format"}
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", False):
            return {"type": ["integer", "string"]}
    elif isinstance(schema, list):
        schema = [strict(value) for value in schema]
    return schema


def by_definition(thing, crds):
    import jsonschema

    name = {"ClusterTrainingRuntime": "clustertrainingruntimes", "TrainJob": "trainjobs"}[thing["kind"]]
    definition = yaml.safe_load((crds / f"trainer.kubeflow.org_{name}.yaml").read_text())
    version = thing["apiVersion"].split("/")[1]
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"] if one["name"] == version]
    schema = strict(schema)
    # Kubernetes checks the metadata by itself.
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(thing)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--crds", type=Path)
    options = parser.parse_args()
    problems, kinds = [], set()
    for block in re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/clusters.md").read_text(), re.M | re.S):
        for thing in yaml.safe_load_all(block):
            if not str(thing.get("apiVersion")).startswith("trainer.kubeflow.org/"):
                continue
            kinds.add(thing["kind"])
            model = getattr(models, f"TrainerV1alpha1{thing['kind']}")
            try:
                found = differences(thing, model.from_dict(thing).to_dict())
            except ValueError as error:
                found = [str(error)]
            if options.crds and not found:
                found = by_definition(thing, options.crds)
            problems += [f"{thing['kind']}{problem}" for problem in found]
    if kinds != KINDS:
        problems.append(f"docs/clusters.md must have {KINDS}, not {kinds}")
    print("\n".join(problems) or f"{' and '.join(sorted(kinds))} are valid")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
