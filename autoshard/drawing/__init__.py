"""Pictures as shapes, and what draws them: SVG and PNG."""
