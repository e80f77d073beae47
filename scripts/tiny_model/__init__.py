"""How the bundled model `kvasir-tiny` was made: `text`, `training`, `files`."""
