# Every target builds the environment first if needed; see tools/venv.py.
PYTHON ?= python3.11
# One process per core, each with whole files; a server takes 5 GB, so no more than four.
PARALLEL ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help venv lock demo serve test test-ci test-parts mutants lint verify-long soak-ops soak-server bench replay compatibility clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: ## build the CPU environment if needed, apply the series, print its directory
	@$(PYTHON) tools/venv.py

lock: ## resolve requirements-cpu.in into requirements-cpu.lock
	$(PYTHON) tools/venv.py --lock

demo: ## the real server on this CPU: cache hits against cold runs, on stock and with the switch off and on
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/sglang-bitexact demo --out build/demo

serve: ## a server on the tiny model that stays up; prints a curl line; SERVE="..." passes server arguments on
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/sglang-bitexact serve --out build/serve $(if $(SERVE),-- $(SERVE))

test: ## the whole suite; PYTEST="..." passes arguments on
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python -m pytest $(PARALLEL) $(PYTEST)

test-ci: ## what takes longer: hits against cold runs on eight servers, upstream's fixtures, poison
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python -m pytest $(PARALLEL) -m ci $(PYTEST)

test-parts: ## every part on its own: build the series up to it and run its tests
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python tools/test_parts.py

mutants: ## break the feature in listed ways, one at a time: does a test notice each?
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python tools/mutants.py $(MUTANTS)

lint: ## ruff, mypy, codespell
	@venv=$$($(PYTHON) tools/venv.py) && PATH=$$venv/bin:$$PATH $$venv/bin/python -m pre_commit run --all-files

verify-long: ## every setting of the server, thousands of cache hits against cold runs; hours, can be interrupted
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python -m sglang_bitexact.verify.long --out build/verify-long

soak-server: ## ten minutes of 64 clients, some hang up, over storage that fails and changes bytes
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python tools/soak_server.py $(SOAK)

soak-ops: ## random operations on the caches beside a model, 10^6 of them; SOAK="--steps 20000 --seed 1"
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python tools/soak_ops.py $(SOAK)

bench: ## the figures of docs/performance.md, in a report and a page; BENCH="--quick --only restore"
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python benchmark/bench.py --out build/bench $(BENCH)

replay: ## conversations against the real tree: reuse that is left under each placement of tiles, and their cost
	@venv=$$($(PYTHON) tools/venv.py) && \
	$$venv/bin/python benchmark/make_trace.py --out build/replay/trace.jsonl && \
	$$venv/bin/python benchmark/trace_replay.py --trace build/replay/trace.jsonl --out build/replay $(REPLAY)

compatibility: ## write the tables of docs/developing.md anew: which edits anchor in other releases
	@venv=$$($(PYTHON) tools/venv.py) && $$venv/bin/python tools/compatibility.py

clean: ## delete build/ and dist/
	rm -rf build dist
