"""Documents of other tools, read as what a plan must keep to: a mesh, its uses, stored layouts."""
