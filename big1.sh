cd /tmp/hostile
W=/work/wt/hostile; T=$W/docs/example/tiny-moe; Q=/work/shared/models/tiny-qwen3moe
rm -rf m o*; cp -r $T m
echo "### 1"
./k quantize-cpu m o --method int4 --numa 1
sum0=$(cat m/* | sha256sum); sumo=$(cat o/* 2>/dev/null | sha256sum)
./k plan m --hot 2 --write m/config.json
./k plan m --hot 2 --write m/new.json
./k plan m --hot 2 --write o/ktconv.json
./k quantize-cpu m o2 --target-bits 5 --write-recipe m/config.json --dry-run
./k quantize-cpu m o2 --target-bits 5 --write-recipe o/r.toml --dry-run
ls -d o2
echo "### 2"
for M in rawint4 int4-g64 int4-g128 int8-g128; do ./k quantize-cpu m o-$M --method $M; rm o-$M/ktconv.json
$W/.venv/bin/python - <<P
import glob,json,struct,random
f=sorted(glob.glob('/tmp/hostile/o-$M/*.safetensors'))[0]
b=bytearray(open(f,'rb').read());n=struct.unpack('<Q',b[:8])[0];h=json.loads(b[8:8+n])
k=[x for x in h if 'experts' in x and ('packed' in x or 'weight' in x) and 'scale' not in x and 'shape' not in x]
k=k[0];a,e=h[k]['data_offsets']; b[8+n+a+37]^=1; open(f,'wb').write(b); print(k)
P
L=3 ./k verify o-$M --source m --level weights; done
echo "sources unchanged?"; [ "$sum0" = "$(cat m/* | sha256sum)" ] && echo yes; [ "$sumo" = "$(cat o/* 2>/dev/null| sha256sum)" ] && echo yes
