# Every target builds the environment first if needed; see tools/venv.py.
PYTHON ?= python3.11

.PHONY: help venv lock demo serve test lint bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

venv: ## build the CPU environment if needed, apply the series, print its directory
	@$(PYTHON) tools/venv.py

lock: ## resolve requirements-cpu.in into requirements-cpu.lock
	$(PYTHON) tools/venv.py --lock

demo: ## the real server on this CPU: how far a stock cache hit is from a cold run
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/sglang-bitexact demo --out build/demo

serve: ## a server on the tiny model that stays up; prints a curl line
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/sglang-bitexact serve --out build/serve

test: ## the whole suite; PYTEST="..." passes arguments on
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python -m pytest $(PYTEST)

lint: ## ruff, mypy, codespell
	@venv=$$($(PYTHON) tools/venv.py) && PATH=$$venv/bin:$$PATH $$venv/bin/python -m pre_commit run --all-files

bench: ## what the no-op calls of part 1 cost, stock against part 1
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python benchmark/noop_hooks.py

clean: ## delete build/ and dist/
	rm -rf build dist
