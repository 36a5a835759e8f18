"""The page that plays a film: markup, style and script, with places for the tree's style and the frames."""

PAGE = r"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>The radix tree over time</title><style>/*STYLE*/
body{margin:0;background:#fff;color:#1f2328;font:14px system-ui,sans-serif}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
main{max-width:1240px;margin:0 auto;padding:18px 20px}h1{font-size:17px;margin:0 0 2px;min-height:1.3em}
#note{margin:0 0 10px;min-height:1.4em}
#said{opacity:.7;margin:4px 0 12px;font-size:13px}#slots{display:flex;height:9px;border:1px solid var(--edge);
border-radius:5px;overflow:hidden;margin-top:10px}#slots i{all:unset;transition:width .35s}
#slots .protected{background:var(--protected)}#slots .pinned{background:var(--pinned)}
#slots .evictable{background:var(--evictable)}nav{display:flex;gap:8px;align-items:center;margin:6px 0}
button{font:inherit;padding:4px 12px;border:1px solid #8aa4c4;border-radius:7px;background:none;color:inherit;
cursor:pointer}button:hover{background:#8aa4c433}#time{flex:1;accent-color:#4a7ab5}#at{min-width:8em;text-align:right;
font-variant-numeric:tabular-nums;opacity:.7}#chapters{display:flex;flex-wrap:wrap;gap:6px;margin:8px 0 4px}
#chapters button{font-size:12px;padding:2px 9px;border-color:#8aa4c466}#chapters .now{background:#4a7ab533;
border-color:#4a7ab5}#stage{overflow:auto}
.bw-tree g{transition:transform .35s,opacity .35s}.bw-tree g rect{transition:width .35s,fill .35s}
.bw-tree g.new rect{stroke-width:2.5}
@media(prefers-reduced-motion:reduce){.bw-tree g,.bw-tree g rect{transition:none}}
</style></head><body><main>
<h1 id="chapter"></h1><p id="note"></p>
<nav><button id="play" aria-label="play or pause">Play</button><button id="back" aria-label="one step back">◀</button>
<button id="next" aria-label="one step on">▶</button><input id="time" type="range" min="0" value="0"
aria-label="which frame"><span id="at"></span></nav><div id="chapters"></div>
<div id="stage" class="bw-tree"></div>
<div id="slots" class="bw-tree" title="the slots">
<i class="protected"></i><i class="pinned"></i><i class="evictable"></i></div>
<p id="said"></p>
<p class="bw-tree"><i class="protected"></i>in use<i class="pinned"></i>pinned<i class="evictable"></i>cached
<span style="margin-left:14px">dashed: evicted or regrouped since the last frame</span></p>
</main><script id="frames" type="application/json">/*FRAMES*/</script><script>
"use strict";
const $=id=>document.getElementById(id),NS="http://www.w3.org/2000/svg",frames=JSON.parse($("frames").textContent);
let boxes={};for(const f of frames){boxes={...boxes,...f.boxes};
 for(const k in boxes)if(boxes[k]===null)delete boxes[k];f.boxes={...boxes}}
const make=(name,to,set={})=>{const e=document.createElementNS(NS,name);
 for(const k in set)e.setAttribute(k,set[k]);to.append(e);return e};
let width=300,height=120;
for(const f of frames)for(const b of Object.values(f.boxes)){width=Math.max(width,b[0]+b[2]+14);
 height=Math.max(height,b[1]+42)}
const svg=make("svg",$("stage"),{viewBox:`0 0 ${width} ${height}`,width,role:"img"}),shown={},
 back=make("g",svg),lines=make("g",svg),front=make("g",svg);
let now=0,timer=null;
function draw(i){const before=frames[Math.max(0,now)].boxes,step=i===now+1;now=Math.max(0,Math.min(frames.length-1,i));
 const f=frames[now];if(!f)return;const ghosts={};
 if(step)for(const k in before)if(!(k in f.boxes))ghosts[k]=before[k];
 for(const k in shown)if(!(k in f.boxes)&&!(k in ghosts)){shown[k].remove();delete shown[k]}
 lines.replaceChildren();
 for(const [k,b] of [...Object.entries(ghosts),...Object.entries(f.boxes)]){
  const [x,y,w,label,kept,hover,count,line]=b,gone=k in ghosts;let g=shown[k];
  if(!g){g=shown[k]=make("g",front);g.style.transform=`translate(${x}px,${y}px)`;
   make("title",g);make("rect",g,{height:28,rx:6});make("text",g,{x:8,y:18});
   make("text",g,{class:"count",y:18,"text-anchor":"end"})}
  const layer=gone?back:front;if(g.parentNode!==layer)layer.append(g);
  const [title,rect,text,number]=g.children;title.textContent=hover;rect.setAttribute("class",gone?"gone":kept);
  rect.setAttribute("width",w);rect.style.width=w+"px";text.textContent=label;
  number.textContent=kept==="root"?"":count;number.setAttribute("x",w-6);
  g.style.transform=`translate(${x}px,${y}px)`;g.style.opacity=gone?.25:1;
  g.setAttribute("class",k in before||now===0?"":"new");
  if(line&&!gone)make("path",lines,{d:line})}
 const kept={};for(const b of Object.values(f.boxes))kept[b[4]]=(kept[b[4]]||0)+b[6];
 for(const s of $("slots").children)s.style.width=100*(kept[s.className]||0)/f.slots+"%";
 $("chapter").textContent=f.chapter;$("note").textContent=f.note;$("said").textContent=f.said;$("time").value=now;
 $("at").textContent=`${now+1} of ${frames.length}, ${f.at.toFixed(2)} s`;
 for(const b of $("chapters").children)b.className=b.textContent===f.chapter?"now":""}
function pause(){clearInterval(timer);timer=null;$("play").textContent="Play"}
function play(){if(timer)return pause();if(now>=frames.length-1)draw(0);$("play").textContent="Pause";
 timer=setInterval(()=>now>=frames.length-1?pause():draw(now+1),Math.max(120,Math.min(700,30000/frames.length)))}
$("play").onclick=play;$("back").onclick=()=>{pause();draw(now-1)};$("next").onclick=()=>{pause();draw(now+1)};
$("time").max=Math.max(0,frames.length-1);$("time").oninput=e=>{pause();draw(+e.target.value)};
addEventListener("keydown",e=>{if(e.target.tagName==="INPUT"||e.target.tagName==="BUTTON")return;
 if(e.key===" "){e.preventDefault();play()}
 if(e.key==="ArrowLeft"){pause();draw(now-1)}if(e.key==="ArrowRight"){pause();draw(now+1)}});
frames.forEach((f,i)=>{if(f.chapter&&(i===0||frames[i-1].chapter!==f.chapter)){const b=document.createElement("button");
 b.textContent=f.chapter;let last=i;while(last+1<frames.length&&frames[last+1].chapter===f.chapter)last++;
 b.onclick=()=>{pause();draw(last)};$("chapters").append(b)}});
const opened=$("chapters").children[location.hash.slice(1)-1];
if(opened)opened.onclick();else draw(0);
</script></body></html>
"""
