"""List the packages; everything else is in pyproject.toml.

The folders linked into `accel/` have no `__init__.py` on purpose, so only the namespace finder sees them.
"""

from setuptools import find_namespace_packages, setup

setup(packages=find_namespace_packages(include=["accel", "accel.*"]))
