"""Parts of `make docs`: what mkdocs asks for beside the pages of docs/, and what is generated into docs/."""
