// The parts of Apache ECharts that a page uses; echarts.min.js is made of them. In a folder with this file:
//   npm install echarts@6.1.0 zrender@6.1.0 esbuild@0.28.2
//   npx esbuild entry.js --bundle --minify --format=iife --global-name=echarts --legal-comments=none \
//     "--banner:js=$(head -1 echarts.min.js)" --outfile=new.min.js
import { use } from "echarts/core";
import { LineChart, ScatterChart, TreemapChart } from "echarts/charts";
import {
  GridComponent, MarkAreaComponent, MarkLineComponent, MarkPointComponent, TooltipComponent,
} from "echarts/components";
import { SVGRenderer } from "echarts/renderers";

use([
  LineChart, ScatterChart, TreemapChart, GridComponent, MarkAreaComponent, MarkLineComponent,
  MarkPointComponent, TooltipComponent, SVGRenderer,
]);
export { init } from "echarts/core";
