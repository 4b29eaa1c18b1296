#!/bin/sh
# A job by redis-cli alone: push it, read its events as they come, save its picture.
#
#   examples/push_redis_cli.sh "a large blue star on a yellow background" star.png
#
# REDIS_CLI: how to call redis-cli, such as "redis-cli -p 16379".
set -eu

prompt=$1 file=$2
redis_cli=${REDIS_CLI:-redis-cli}

# The entry's id is the job's id, since the push names none.
id=$($redis_cli XADD sw:jobs '*' prompt "$prompt" width 128 height 128 num_inference_steps 12)
echo "job $id"

# Without a terminal redis-cli prints one value a line: the entry's id, then names and values.
seen=0 over=0
while [ "$over" != 1 ]; do
    over=$($redis_cli HGET "sw:job:$id" is_terminal)
    news=$($redis_cli XREAD BLOCK 2000 STREAMS "sw:events:$id" "$seen")
    if [ -n "$news" ]; then
        seen=$(echo "$news" | grep -E '^[0-9]+-[0-9]+$' | tail -n 1)
        echo "$news" | grep -A 1 -x type | grep -vxE 'type|--'
    fi
done

status=$($redis_cli HGET "sw:job:$id" status)
if [ "$status" != succeeded ]; then
    echo "$status: $($redis_cli HGET "sw:job:$id" error)" >&2
    exit 1
fi
$redis_cli --raw GET "sw:output:$id:0" > "$file"
echo "$file"
