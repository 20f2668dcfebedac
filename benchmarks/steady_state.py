import os, sys
os.environ["OMP_NUM_THREADS"]="1"
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _turns import compare
from _gpt import Size
from _worlds import Setting
import time
if __name__=="__main__":
    which=sys.argv[1]; pairs=int(sys.argv[2])
    cases={"a":(Setting("ntp",(1,1)),Setting("ddp",(1,1)),True),"b":(Setting("ntp",(2,2)),Setting("dtensor",(2,2)),False),"c":(Setting("ntp",(4,)),Setting("dtensor",(4,)),False),
    "m":(Setting("dtensor",(2,2)),Setting("ddp",(1,1)),False)}
    for w in which:
        x,y,clip=cases[w]
        t=time.time()
        with x.start(Size(),clip) as ours, y.start(Size(),clip) as theirs:
            c=compare(ours,theirs,pairs,5,3)
        print(w,x.name,y.name,"wall",c.wall,"cpu",c.cpu, "s", round(time.time()-t,1))
        print([round(t.seconds*1e3) for t in c.ours],[round(t.seconds*1e3) for t in c.theirs],[round(t.cpu_seconds*1e3) for t in c.ours],[round(t.cpu_seconds*1e3) for t in c.theirs])
