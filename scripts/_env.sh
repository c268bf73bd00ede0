# Sourced by the scripts beside it: interpreters, environments, and steps that
# leave one line each in the summary at the end.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
ENVS=$PWD/.venvs
LOGS=$PWD/build/logs
WHERE=$PWD    # the directory that steps run in
NOTE=         # what the summary says about the next step besides its result
BUDGET=86400  # seconds for the script as a whole
ROWS=() PASSED=0 FAILED=0
mkdir -p "$LOGS"

# python_of VERSION...: the first of these Pythons that is on this machine.
# Asked to run, since a name on PATH may be an empty shim, and for ensurepip,
# which some distributions leave out.
python_of() {
  local version candidate versions
  versions=$(pyenv root 2>/dev/null)/versions
  for version in "$@"; do
    for candidate in "python$version" "$versions/$version".*/bin/python; do
      if "$candidate" - "$version" 2>/dev/null <<'PY'
import ensurepip, sys
wanted = sys.version.startswith(sys.argv[1] + ".")
sys.exit(not (wanted and sys.version_info >= (3, 11)))
PY
      then
        command -v "$candidate"
        return
      fi
    done
  done
  echo "no Python of $* with venv and ensurepip on this machine" >&2
  return 1
}

# make_env NAME PYTHON PIP-ARGUMENTS...: an environment, made when it is missing and
# made anew when the interpreter, the arguments or what pyproject.toml says before
# its settings of tools changes.
make_env() {
  local dir=$ENVS/$1 python=$2 stamp
  shift 2
  stamp=$({
    "$python" -VV
    sed '/^\[tool/,$d' pyproject.toml
    echo "$PWD $*"
  } | cksum)
  [[ -f $dir/stamp && $(<"$dir/stamp") == "$stamp" ]] && return
  echo "Installing into ${dir#"$PWD"/} ($("$python" -V); once, a minute or two) ..."
  "$python" -m venv --clear "$dir" &&
    pip_install "$dir" --upgrade pip && # dependency groups need pip 25.1
    pip_install "$dir" "$@" &&
    echo "$stamp" >"$dir/stamp"
}

pip_install() {
  local dir=$1
  shift
  limit 900 "$dir/bin/python" -m pip install -qq --disable-pip-version-check "$@"
}

# limit SECONDS COMMAND...: macOS has no timeout; there the command runs on.
limit() {
  local seconds=$1
  shift
  if command -v timeout >/dev/null; then
    timeout -s INT -k 30 "$seconds" "$@" # on INT pytest still says what failed
  else
    "$@"
  fi
}

# count LOG WORD: the number before WORD in the closing line of a test run.
count() {
  local number
  number=$(grep -E '(passed|failed|errors?)\b.* in [0-9.]+ ?s' "$1" | tail -n 1 |
    grep -oE "[0-9]+ $2" | grep -oE '[0-9]+')
  echo "${number:-0}"
}

row() {
  ROWS+=("$(printf '%-9s  %-6s  %s' "$@")")
}

# broken NAME WHY: a step that could not even start.
broken() {
  row "$1" FAILED "$2"
  FAILED=$((FAILED + 1))
}

# step NAME SECONDS COMMAND...: runs it and adds a line to the summary.
step() {
  local name=$1 seconds=$2 log=$LOGS/$1.log begin=$SECONDS
  local code passed failed word=ok said=
  shift 2
  ((seconds > BUDGET - SECONDS)) && seconds=$((BUDGET - SECONDS))
  ((seconds < 10)) && broken "$name" "no time left" && return 1
  printf '\n== %s\n' "$name"
  (cd "$WHERE" && limit "$seconds" "$@" </dev/null) 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  passed=$(count "$log" passed)
  failed=$(($(count "$log" failed) + $(count "$log" 'errors?')))
  ((passed + failed)) && said="$passed passed, $failed failed in "
  said+="$((SECONDS - begin)) s"
  ((code == 124 || code == 137)) && said="stopped after $seconds s"
  ((code)) && word=FAILED && ((failed == 0)) && failed=1
  row "$name" "$word" "$said${NOTE:+ ($NOTE)}"
  PASSED=$((PASSED + passed)) FAILED=$((FAILED + failed))
  return "$code"
}

# finish: the summary; its last line is the one that CI services look for.
finish() {
  printf '\n'
  printf '%s\n' "${ROWS[@]}"
  printf '%d passed, %d failed\n' "$PASSED" "$FAILED"
  ((FAILED == 0))
  exit
}
