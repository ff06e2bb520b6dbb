"""The update of a step in the next run: what is sent travels under the next forward pass, too."""
